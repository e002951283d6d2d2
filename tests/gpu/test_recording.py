"""Steps that are recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core.batch import Batch, Epoch
from coterie.core.steps import fold
from coterie.execution import Stacked
from coterie.gpu import devices
from coterie.methods import METHODS
from coterie.privacy.noise import ReproducibleNoise
from coterie.privacy.private_sgd import SampleNoise
from tests import toy
from tests.fake_graphs import FakeGraphs


def run(*values: float, size: int = 2, alone: bool = False) -> Epoch:
    x = torch.tensor(values)
    return Epoch(Batch(x, x.long(), x.long(), alone=alone), size, *divmod(len(values), size))


def horner(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    return carry[0] * 10 + batch.x.sum(), carry[1] + 1


START = (torch.tensor(0.0), torch.tensor(0))


def folded(recorder: FakeGraphs, *runs: Epoch) -> list[float]:
    return [float(t) for t in replayed(recorder, lambda: fold(START, ((horner, run) for run in runs)))]


def replayed(recorder: FakeGraphs, body: Callable[[], Any]) -> Any:
    recorded = recorder.record(body)
    recorder.replayed = 0
    for _ in range(2):  # the second time finds the memory as the first has left it
        for part in recorded.parts:
            part()
    recorder.replayed //= 2
    return recorded.written


def test_fold_goes_through_all_steps_in_order() -> None:
    runs, recorder = [run(1, 2, 4, 1, 3), run(0, 2, 1, 1, 9)], FakeGraphs()
    plain = fold(START, ((horner, run) for run in runs))
    assert [float(t) for t in plain] == folded(recorder, *runs) == [353229, 6]
    assert (recorder.recorded, recorder.replayed) == (2, 5)  # of two samples and of one; the first is done as it is
    assert [float(t) for t in START] == [0, 0]


def test_few_steps() -> None:
    assert folded(FakeGraphs()) == folded(FakeGraphs(), run()) == [0, 0]
    assert folded(FakeGraphs(), run(7)) == [7, 1]
    assert folded(FakeGraphs(), run(7), run(8), run(9)) == [789, 3]
    assert folded(FakeGraphs(), run(1, 2), run(3, 4)) == [37, 2]


def test_steps_of_several_kinds_share_a_carry() -> None:
    """A carry may get its form only when the second kind comes: what was recorded before is recorded again."""

    def add(carry: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        return carry | {"sum": carry["sum"] + batch.x.sum() + carry.get("count", torch.zeros(()))}

    def count(carry: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        return carry | {"count": carry.get("count", torch.zeros(())) + len(batch.x)}

    work = [(add, run(1, 2, 3, 4)), (count, run(5, 6, 7, 8)), (add, run(1, 1, 1, 1)), (count, run(2, 3, 4, 5))]
    recorder = FakeGraphs()
    made = replayed(recorder, lambda: fold({"sum": torch.zeros(())}, work))
    assert {name: float(t) for name, t in made.items()} == {"sum": 22, "count": 8}
    assert made == fold({"sum": torch.zeros(())}, work)
    assert (recorder.recorded, recorder.replayed) == (3, 6)


def test_a_client_computed_alone_is_not_recorded() -> None:
    recorder = FakeGraphs()
    assert folded(recorder, run(1, 2, 3, alone=True), run(4, 4, 1, alone=True)) == [3381, 4]
    assert recorder.recorded == 0


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.stackable])
def test_every_method_is_the_same_replayed(name: str) -> None:
    assert_same_replayed(toy.method(name, momentum=0.5), toy.model(torch.float32))


@pytest.mark.parametrize("name", ["fedavg", "fedpac", "fedreg", "fedem", "pfakd"])
def test_with_batchnorm_too(name: str) -> None:
    assert_same_replayed(toy.method(name, momentum=0.5), toy.model(torch.float32, batch_norm=True))


@pytest.mark.parametrize("name", ["fedavg", "fedpac", "fedreg", "fedem", "pfakd", "ditto"])
def test_every_replay_draws_masks_of_its_own(name: str) -> None:
    assert_same_replayed(toy.method(name, momentum=0.5), toy.model(torch.float32, dropout=0.3))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_fused_operations_are_recorded(batch_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their CPU references."""
    monkeypatch.setattr(devices, "runs_triton", lambda device: True)
    assert_same_replayed(toy.method("fedavg", momentum=0.5), toy.model(torch.float32, batch_norm=batch_norm))


@pytest.mark.parametrize("name", ["fedavg", "pfedme", "apfl", "fedem"])
def test_noise_of_each_step_is_its_own(name: str) -> None:
    assert_same_replayed(
        SampleNoise(inner=toy.method(name), noise=1.0, bound=0.1, source=ReproducibleNoise()),
        toy.model(torch.float32, dropout=0.3),
    )


def assert_same_replayed(method: Any, model: Any) -> None:
    """To the last bit, with ragged clients and partial participation."""
    data = toy.toy()
    expected, _ = toy.outcome(Stacked(method, model, data, 7), rounds=2)
    clients, recorder = Stacked(method, model, data, 7), FakeGraphs()
    clients.graphs.recorder = recorder
    found, _ = toy.outcome(clients, rounds=2)
    toy.assert_same(expected, found)
    assert recorder.replayed > recorder.recorded > 0
