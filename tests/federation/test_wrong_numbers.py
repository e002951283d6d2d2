"""Numbers that go wrong, and data at the edge: results that are defined, and one line to say what happened."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.federation.history import PATIENCE
from coterie.methods import METHODS
from tests import toy

ONE = coterie.Execution("looped", processes=1)


def broken(clients: int) -> FederatedData:
    """The pixels of the first clients are not numbers."""
    data = toy.toy(augmented=False)
    x = data.train.x.float() / 255
    x[: data.train.starts[clients]] = float("nan")
    return replace(data, train=replace(data.train, x=x))


def test_too_many_clients_left_out_stop_the_run() -> None:
    """Three of five are more than half, and not more than 0.6."""
    with pytest.raises(CoterieError, match=r"round 1: 3 of 5 clients .* more than the share of 0.5"):
        coterie.run(toy.method("fedper"), broken(3), toy.network(), rounds=2, backend=ONE)
    result = coterie.run(toy.method("fedper"), broken(3), toy.network(), rounds=2, backend=ONE, max_left_out=0.6)
    assert result.history[-1].left_out == (0, 1, 2)
    coterie.run(toy.method("fedper"), broken(2), toy.network(), rounds=2, backend=ONE)
    with pytest.raises(CoterieError, match="1 of 5 clients"):
        coterie.run(toy.method("fedper"), broken(1), toy.network(), rounds=2, backend=ONE, max_left_out=0)
    with pytest.raises(CoterieError, match="max_left_out must be at least 0 and at most 1, got 2"):
        coterie.run(toy.method("fedper"), broken(1), toy.network(), max_left_out=2)


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 5, "schedule": "steps:3=1e30", "backend": ONE, "out": tmp_path / "r"}
    for exist in ("error", "resume"):  # and does not pretend to get better by being resumed
        with pytest.raises(CoterieError, match=r"round 4: no client .*; the checkpoint of round 3 is kept"):
            coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), exist=exist, **settings)
    assert (tmp_path / "r" / "checkpoint" / "server-000003.safetensors").exists()


def says_always(answer: int) -> nn.Module:
    network = toy.network()
    head = list(network.modules())[-1]
    nn.init.zeros_(head.weight)  # type: ignore[arg-type]
    head.bias.data = torch.eye(toy.CLASSES)[answer]  # type: ignore[union-attr]
    return network


def test_a_run_that_learns_nothing_gets_one_hint(caplog: pytest.LogCaptureFixture) -> None:
    """A network that gives one answer, and a learning rate of 0: never better than the commonest class."""
    data = toy.toy()
    share = 100 * int(data.test.y.bincount().max()) / len(data.test.y)
    stuck = {"rounds": PATIENCE + 5, "backend": ONE, "evaluate_every": 1}
    coterie.run(toy.method("fedavg", lr=0.0), data, says_always(1), **stuck)
    hints = [record.getMessage() for record in caplog.records if "majority-class" in record.getMessage()]
    assert len(hints) == 1
    assert hints[0].startswith(f"round {PATIENCE}: ")
    assert f"({share:.1f} %)" in hints[0]
    caplog.clear()
    coterie.run(toy.method("fedavg", lr=0.2), data, toy.network(), **stuck)
    assert "majority-class" not in caplog.text


def edge(kind: str) -> FederatedData:
    data = toy.toy()
    if kind == "one class each":
        owners = [split.owners() % 3 for split in (data.train, data.test)]  # and class 3 is nobody's
        return replace(data, train=replace(data.train, y=owners[0]), test=replace(data.test, y=owners[1]))
    if kind == "one sample each":
        return toy.toy(train=(1,) * 5, test=(1,) * 5)
    none = Split(data.test.x[:0], data.test.y[:0], (0,) * 5)
    return replace(data, test=none)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(
    ("kind", "where"), [("one class each", "stacked"), ("one sample each", "looped"), ("no test samples", "stacked")]
)
@pytest.mark.parametrize("name", METHODS)
def test_data_at_the_edge(name: str, kind: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out, method = tmp_path / "r", toy.method(name, local_epochs=1)
    how = coterie.Execution(where, processes=1)
    result = coterie.run(method, edge(kind), toy.network_for(name), rounds=2, join_ratio=0.6, backend=how, out=out)
    told = json.loads((out / "result.json").read_text(), parse_constant=refuse)
    for outcome in told["outcomes"]:
        mean = outcome["last"]["mean"]
        assert mean is None if kind == "no test samples" else 0 <= mean <= 1
    with (out / "metrics.csv").open() as file:
        cells = [cell for row in csv.DictReader(file) for cell in row.values()]
    assert not {"nan", "inf"} & set(cells)
    assert all(t.isfinite().all() for t in result.personal_model(2)(edge("").train.x[:3]).unbind())
    assert not caplog.records


def test_nonsense_in_a_legal_form_is_told() -> None:
    """A variance below zero has the right shape, and no quadratic program."""

    class Liar(METHODS["fedpac"]):  # type: ignore[misc,name-defined]
        def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
            state, up = super().client_train(model, state, down, data)
            return state, up._replace(variance=-torch.ones_like(up.variance))

    with pytest.raises(CoterieError, match=r"client_train sends an update .* not allow: `variance` has -1, below 0"):
        coterie.run(Liar(), toy.toy(), toy.network(), rounds=1, backend=ONE)
