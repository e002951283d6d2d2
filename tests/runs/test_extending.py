"""A finished run goes on for more rounds, and is then the run that had so many from the start."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.federation import Round
from coterie.methods import METHODS
from tests import toy
from tests.runs.test_checkpoint import PowerCut, assert_same, run, stopped

LOOPED = ("fedpac", "knn-per", "scaffold", "fedfomo", "fedphp")  # states of different kinds; the rest: stacked only


@pytest.mark.parametrize(("name", "where"), [*((n, "stacked") for n in METHODS), *((n, "looped") for n in LOOPED)])
def test_an_extended_run_is_the_longer_run(name: str, where: str, tmp_path: Path) -> None:
    """Bit for bit, also if stopped on the way, for methods whose final step changes what clients remember too.

    The full last round and the measurement of a last round that is not one of every third are done at the new end.
    """
    short: dict[str, Any] = {"method": toy.method(name, local_epochs=1), "data": toy.toy(), "evaluate_every": 3}
    short["model"] = toy.network_for(name)
    short["where"] = where
    run(tmp_path / "long", rounds=4, **short)
    run(tmp_path / "r", rounds=2, **short)
    stopped(tmp_path / "r", 3, rounds=4, exist="resume", **short)
    run(tmp_path / "r", rounds=4, exist="resume", **short)
    assert_same(tmp_path / "long", tmp_path / "r")
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["federation"]["rounds"] == 4
    assert config["extended"] == [2]


def test_extended_twice_killed_in_between_and_with_new_clients(tmp_path: Path) -> None:
    more: dict[str, Any] = {"data": toy.toy(train=tuple(range(6, 16)), test=tuple(range(6, 16))), "new_clients": 0.4}
    run(tmp_path / "long", "fedrep", "stacked", rounds=7, **more)
    run(tmp_path / "r", "fedrep", "stacked", rounds=2, **more)
    run(tmp_path / "r", "fedrep", "stacked", rounds=4, exist="resume", **more)
    stopped(tmp_path / "r", 5, "fedrep", "stacked", rounds=7, exist="resume", **more)
    assert not (tmp_path / "r" / "result.json").exists()
    assert not (tmp_path / "r" / "models").exists()
    run(tmp_path / "r", "fedrep", "stacked", rounds=7, exist="resume", **more)
    assert_same(tmp_path / "long", tmp_path / "r")


def test_a_stopped_run_gets_more_rounds_or_fewer(tmp_path: Path) -> None:
    for rounds in (3, 6):
        run(tmp_path / f"whole{rounds}", rounds=rounds)
        stopped(tmp_path / f"cut{rounds}", 2)
        run(tmp_path / f"cut{rounds}", rounds=rounds, exist="resume")
        assert_same(tmp_path / f"whole{rounds}", tmp_path / f"cut{rounds}")
    with pytest.raises(CoterieError, match=r"has completed 6 rounds; rounds must be at least that, got 5"):
        run(tmp_path / "cut6", rounds=5, exist="resume")
    stopped(tmp_path / "cut", 2)
    with pytest.raises(CoterieError, match=r"has completed 2 rounds"):
        run(tmp_path / "cut", rounds=1, exist="resume")


def test_without_the_state_a_run_stays_as_it_is(tmp_path: Path) -> None:
    for name, how in {"a": {"keep_state": False}, "b": {"checkpoint_every": 0}}.items():
        run(tmp_path / name, **how)
        files = [path for path in (tmp_path / name).rglob("*") if path.name != "log.txt" and path.is_file()]
        before = {path: path.read_bytes() for path in files}
        with pytest.raises(CoterieError, match=r"cannot be extended: the state .* Start a new run with --rounds 6"):
            run(tmp_path / name, rounds=6, exist="resume")
        assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("name", ["fedavg", "ditto", "knn-per", "fedpac", "hypcluster"])
def test_resume_of_a_finished_run_returns_its_result(name: str, tmp_path: Path) -> None:
    first = run(tmp_path / "r", name)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "r" / "models").iterdir()}

    def never(record: Round) -> None:
        raise PowerCut

    again = run(tmp_path / "r", name, exist="resume", watch=never)
    assert again.outcomes() == first.outcomes()
    assert [r.number for r in again.history] == [r.number for r in first.history]
    assert again.ended == first.ended == ("rounds", 4, "", None)
    for a, b in zip(first.history, again.history, strict=True):
        assert a.scores.keys() == b.scores.keys()
        for at in a.scores:
            assert toy.rows(a.scores[at]) == toy.rows(b.scores[at])
    x = toy.toy().test.x[:8]
    for client in first.client_ids:
        assert torch.equal(first.personal_model(client)(x), again.personal_model(client)(x))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r" / "models").iterdir()} == before
    with pytest.raises(CoterieError, match=r"method\.train\.lr"):
        run(tmp_path / "r", exist="resume", method=toy.method(name, lr=0.1))


def test_the_guarantee_of_a_longer_run(tmp_path: Path) -> None:
    """More rounds cost more privacy: ε is that of all rounds."""
    private: dict[str, Any] = {"dp": "client", "dp_noise": 2.0, "full_last_round": False}
    long = run(tmp_path / "long", "fedavg", rounds=4, **private)
    short = run(tmp_path / "r", "fedavg", rounds=2, **private)
    longer = run(tmp_path / "r", "fedavg", rounds=4, exist="resume", **private)
    assert long.privacy
    assert short.privacy
    assert longer.privacy
    assert short.privacy["epsilon"] < longer.privacy["epsilon"] == long.privacy["epsilon"]
    told = json.loads((tmp_path / "r" / "config.json").read_text())["protection"]["privacy"]
    assert told["epsilon"] == long.privacy["epsilon"]


def test_what_keeping_the_state_costs(tmp_path: Path) -> None:
    """The server's state and one row for each client: what the formula says, and a few kB of headers."""
    result = run(tmp_path / "r", "ditto", join_ratio=1.0)
    files = [path for path in (tmp_path / "r" / "checkpoint").iterdir() if path.suffix == ".safetensors"]
    tensors = tree.size(result.server) + sum(tree.size(state) for state in result.states) + 8 * len(result.states)
    assert tensors < sum(path.stat().st_size for path in files) < tensors + 10_000


def test_rates_that_depend_on_the_number_of_rounds(tmp_path: Path) -> None:
    train = partial(coterie.run, toy.method("fedavg", schedule="cosine"), toy.toy(), toy.network(), out=tmp_path / "r")
    train(rounds=1)
    with pytest.raises(
        CoterieError, match=r"--schedule cosine depend on the number of rounds, 1; .* cannot be extended"
    ):
        train(rounds=2, exist="resume")
