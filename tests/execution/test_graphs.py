"""Computations that are recorded when they come first, and replayed when they come back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie.execution import graphs as module
from coterie.execution.graphs import Graphs
from tests.fake_graphs import FakeGraphs


def doubled(graphs: Graphs, *values: float, name: str = "") -> list[float]:
    def body(x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor]:
        return (2 * x + more["one"],)

    (found,) = graphs.run(name, body, (torch.tensor(values), {"one": torch.ones(())}))
    return [float(v) for v in found]


def test_recorded_once_for_each_name_and_shape() -> None:
    graphs = Graphs(FakeGraphs())
    for value in range(5):
        assert doubled(graphs, value, 10) == [2 * value + 1, 21]
    assert len(graphs.captured) == 1
    assert doubled(graphs, 4) == doubled(graphs, 4, name="other") == [9]
    assert len(graphs.captured) == 3


def test_what_comes_out_stays_as_it_is() -> None:
    graphs = Graphs(FakeGraphs())
    (kept,) = graphs.run("", lambda x: (x + 1,), (torch.tensor([1.0]),))
    graphs.run("", lambda x: (x + 1,), (torch.tensor([5.0]),))
    assert kept.tolist() == [2]


def test_the_one_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 2)
    graphs = Graphs(FakeGraphs())
    for name in ("a", "b", "a", "c"):
        assert doubled(graphs, 7, name=name) == [15]
    assert [signature[0] for signature in graphs.captured] == ["a", "c"]


def test_large_ones_are_fewer() -> None:
    graphs = Graphs(FakeGraphs(), room=100)
    for name in ("a", "b", "c", "d"):  # each reads two numbers and writes one
        doubled(graphs, 7.0, name=name)
    assert len(graphs.captured) == 4
    for name in ("e", "f", "g"):  # each reads eleven and writes ten
        doubled(graphs, *(0.5,) * 10, name=name)
    assert [signature[0] for signature in graphs.captured] == ["f", "g"]


def test_what_never_fits_is_recorded_all_the_same() -> None:
    """Places that are still in use do not become free with their recording."""
    graphs = Graphs(FakeGraphs(), room=0, shared=True)
    assert doubled(graphs, 7, name="a") == [15]
    used = list(graphs.places.values()) if graphs.places is not None else []
    assert doubled(graphs, 8, name="b") == [17]
    assert used
    assert [signature[0] for signature in graphs.captured] == ["b"]
