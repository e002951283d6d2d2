"""Ranks, Friedman's test and the critical difference, against SciPy and numbers from the literature."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
from scipy import stats

from coterie.analysis.ranking import alike, complete, critical_difference, friedman, ranked, ranking
from coterie.core.errors import CoterieError


def test_ranks_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.integers(0, 4, 7) / 4  # with ties
        assert ranked(scores.tolist()) == stats.rankdata(-scores).tolist()
        assert ranked(scores.tolist(), higher=False) == stats.rankdata(scores).tolist()


def test_friedmans_test_is_that_of_scipy() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        scores = rng.integers(0, 6, (9, 4)) / 8  # 9 benchmarks, 4 methods, with ties
        ranks = np.array([ranked(row) for row in scores.tolist()])
        found = friedman(ranks)
        assert (found.statistic, found.p) == pytest.approx(tuple(stats.friedmanchisquare(*scores.T)))
        assert found.f == pytest.approx(8 * found.statistic / (9 * 3 - found.statistic))
        assert found.f_p == pytest.approx(stats.f.sf(found.f, 3, 24))


def test_the_critical_difference_of_demsars_example() -> None:
    """JMLR 2006: four classifiers on 14 datasets."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_values_of_the_table(k: int, q: float) -> None:
    """Demšar's Table 5 (a), at 5 %."""
    assert critical_difference(k, 6) == pytest.approx(q * (k * (k + 1) / 36) ** 0.5, abs=2e-3)


def test_by_hand() -> None:
    """Three benchmarks; on the last, smaller is better. Ranks a: 1 1 1.5, b: 2 3 1.5, c: 3 2 3."""
    scores = {"x": {"a": 0.9, "b": 0.8, "c": 0.7}, "y": {"a": 3.0, "b": 1.0, "c": 2.0}}
    scores["z"] = {"a": 5.0, "b": 5.0, "c": 6.0}
    found = ranking(scores, {"x": True, "y": True, "z": False})
    assert found is not None
    assert found.ranks == pytest.approx({"a": 3.5 / 3, "b": 6.5 / 3, "c": 8 / 3})
    assert list(found.ranks) == ["a", "b", "c"]
    assert found.test is not None
    # 12 / (N k (k + 1)) Σ (R - N (k + 1) / 2)² = 12 / 36 · 10.5 = 3.5; divided by 1 - (2³ - 2) / (N k (k² - 1))
    assert found.test.statistic == pytest.approx(3.5 / (1 - 6 / 72))
    assert found.groups == [["a", "b", "c"]]  # the critical difference is 1.91


def test_groups_are_the_longest_runs() -> None:
    assert alike({"a": 1, "b": 1.5, "c": 2.4, "d": 4}, 1.0) == [["a", "b"], ["b", "c"]]
    assert alike({"a": 1, "b": 1.5, "c": 1.9, "d": 4}, 1.0) == [["a", "b", "c"]]
    assert alike({"a": 1, "b": 3}, 1.0) == []


def test_only_what_is_complete_is_ranked() -> None:
    full = {"a": 0.3, "b": 0.2, "c": 0.1}
    assert complete({"x": full, "y": {"a": 0.3, "b": 0.2}}) == (["x", "y"], ["a", "b"])  # a method with a gap
    assert complete({"x": full, "y": full, "z": {"a": 0.1}}) == (["x", "y"], ["a", "b", "c"])  # a benchmark of gaps
    assert ranking({"x": {"a": 1.0}}, {"x": True}) is None
    two = ranking({"x": {"a": 1.0, "b": 2.0}}, {"x": True})
    assert two is not None
    assert (two.ranks, two.test) == ({"b": 1.0, "a": 2.0}, None)
    assert "three methods" in two.missing


def test_ties_everywhere_are_not_tested() -> None:
    same = {name: {"a": 0.5, "b": 0.5, "c": 0.5} for name in "xy"}
    found = ranking(same, dict.fromkeys("xy", True))
    assert found is not None
    assert found.test is None
    assert "tie" in found.missing


def test_without_scipy_there_are_still_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CoterieError, match=r"coterie\[stats\]"):
        critical_difference(3, 3)
    found = ranking({name: {"a": 0.3, "b": 0.2, "c": 0.1} for name in "xy"}, dict.fromkeys("xy", True))
    assert found is not None
    assert found.ranks == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert "SciPy" in found.missing
