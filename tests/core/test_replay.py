"""Steps that are recorded and replayed, on a CPU: a tape of operations stands for a graph of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.clients import Batched
from coterie.core.local import Batch
from coterie.core.replay import Recorded, fold, recording
from coterie.methods import METHODS
from coterie.protection.private_sgd import SampleNoise
from tests import toy


class Tape(TorchDispatchMode):
    """Operations and the tensors they read and write: like a graph, it knows places in memory, and no Python."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.before += [(t, t.clone()) for t in tree_leaves(args) if isinstance(t, Tensor)]
        made = func(*args, **(kwargs or {}))
        self.lines.append((func, args, kwargs or {}, made))
        return made

    def rewind(self) -> None:
        """To record is not to do."""
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    def replay(self) -> None:
        for func, args, kwargs, made in self.lines:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class Recorder:
    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, body: Callable[[], Any]) -> Recorded:
        self.recorded += 1
        with Tape() as tape:
            body()
        tape.rewind()

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return Recorded(replay, None)


def batch(*values: float) -> Batch:
    x = torch.tensor(values)
    return Batch(x, x.long(), x.long())


def test_fold_goes_through_all_batches_in_order() -> None:
    def horner(carry: tuple[Tensor, Tensor], one: Batch) -> tuple[Tensor, Tensor]:
        return carry[0] * 10 + one.x.sum(), carry[1] + 1

    def given() -> Iterator[Batch]:
        return iter([batch(1, 2), batch(4), batch(2, 3), batch(1, 1), batch(6), batch(7, 0)])

    start, recorder = (torch.tensor(0.0), torch.tensor(0)), Recorder()
    plain = fold(horner, start, given())
    with recording(recorder):  # type: ignore[arg-type]
        replayed = fold(horner, start, given())
    assert plain == replayed == (torch.tensor(345267.0), torch.tensor(6))
    assert start == (torch.tensor(0.0), torch.tensor(0))
    assert (recorder.recorded, recorder.replayed) == (2, 5)  # of one sample and of two; the first is done as it is


def test_nothing_given_leaves_the_carry() -> None:
    with recording(Recorder()):  # type: ignore[arg-type]
        assert fold(lambda carry, one: carry + 1, torch.tensor(3), list[Batch]()) == 3


def test_a_client_computed_alone_is_not_recorded() -> None:
    recorder = Recorder()
    with recording(recorder):  # type: ignore[arg-type]
        fold(lambda carry, one: carry + 1, torch.tensor(3), [batch(1)._replace(alone=True)] * 4)
    assert recorder.recorded == 0


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.batched])
def test_every_method_is_the_same_replayed(name: str, batch_norm: bool) -> None:
    assert_same_replayed(toy.method(name, momentum=0.5), toy.model(torch.float32, batch_norm=batch_norm))


@pytest.mark.parametrize("name", ["fedavg", "pfedme", "apfl", "fedem"])
def test_noise_of_each_step_is_its_own(name: str) -> None:
    assert_same_replayed(SampleNoise(inner=toy.method(name), noise=1.0, bound=0.1), toy.model(torch.float32))


def assert_same_replayed(method: Any, model: Any) -> None:
    """To the last bit, with ragged clients and partial participation."""
    data = toy.toy()
    expected, _ = toy.outcome(Batched(method, model, data, 7), rounds=2)
    clients, recorder = Batched(method, model, data, 7), Recorder()
    clients.graphs.recorder = recorder  # type: ignore[assignment]
    clients.graphs.patience.clear()
    found, _ = toy.outcome(clients, rounds=2)
    toy.assert_same(expected, found)
    assert recorder.replayed > recorder.recorded > 0
