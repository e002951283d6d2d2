"""Whole computations that are recorded once they have come back often enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie.clients import graphs as module
from coterie.clients.graphs import Graphs
from tests.tape import Recorder


def patient(times: int) -> Graphs:
    graphs = Graphs(Recorder())  # type: ignore[arg-type]
    graphs.patience = {"train": times}
    return graphs


def doubled(graphs: Graphs, *values: float, task: str = "train", name: str = "") -> list[float]:
    def body(x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor]:
        return (2 * x + more["one"],)

    (found,) = graphs.run(task, name, body, (torch.tensor(values), {"one": torch.ones(())}))
    return [float(v) for v in found]


def test_recorded_when_it_came_often_enough() -> None:
    graphs = patient(3)
    for times in range(1, 6):
        assert doubled(graphs, times, 10) == [2 * times + 1, 21]
        assert len(graphs.captured) == (times >= 3)
    assert (graphs.recorder.recorded, graphs.recorder.replayed) == (1, 3)  # type: ignore[union-attr]


def test_each_computation_counts_for_itself() -> None:
    graphs = patient(2)
    for _ in range(5):
        assert doubled(graphs, 1, task="finish") == [3]  # never
    doubled(graphs, 1)
    doubled(graphs, 1, 2)
    doubled(graphs, 1, name="other")
    assert not graphs.captured
    assert doubled(graphs, 4) == [9]
    assert len(graphs.captured) == 1


def test_what_comes_out_stays_as_it_is() -> None:
    graphs = patient(1)
    first = doubled(graphs, 1)
    (kept,) = graphs.run("train", "", lambda x: (x + 1,), (torch.tensor([1.0]),))
    graphs.run("train", "", lambda x: (x + 1,), (torch.tensor([5.0]),))
    assert (first, kept.tolist()) == ([3], [2])


def test_the_one_not_used_for_longest_goes_and_must_come_as_often_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 2)
    graphs = patient(2)
    for name in ("a", "a", "b", "b", "a", "c", "c"):
        assert doubled(graphs, 7, name=name) == [15]
    assert [signature[1] for signature in graphs.captured] == ["a", "c"]
    doubled(graphs, 7, name="b")
    assert [signature[1] for signature in graphs.captured] == ["a", "c"]
    doubled(graphs, 7, name="b")
    assert [signature[1] for signature in graphs.captured] == ["c", "b"]
