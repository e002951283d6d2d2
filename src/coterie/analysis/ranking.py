"""Methods over several benchmarks: average ranks, Friedman's test, and Nemenyi's critical difference (Demšar 2006)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError

LEVEL = 0.05
DIGITS = 9  # scores that agree to this many decimals tie


class Friedman(NamedTuple):
    """Whether methods differ at all. Needs SciPy, three methods and two benchmarks."""

    statistic: float  # χ² with k - 1 degrees of freedom
    p: float
    f: float  # Iman and Davenport's F, which is less conservative; inf: all benchmarks rank alike
    f_p: float
    critical: float  # average ranks that differ by less are not significantly different (Nemenyi, 5 %)


class Ranking(NamedTuple):
    """Average ranks of methods, best first, over the benchmarks on which all of them have a score."""

    benchmarks: tuple[str, ...]
    ranks: dict[str, float]  # method -> average rank; 1 is the best
    test: Friedman | None  # None: too few methods or benchmarks, or SciPy is missing
    missing: str  # why there is no test

    @property
    def groups(self) -> list[list[str]]:
        """Longest runs of two or more neighboring methods without a significant difference (Nemenyi)."""
        return alike(self.ranks, self.test.critical) if self.test else []


def ranked(scores: Sequence[float], higher: bool = True) -> list[float]:
    """Rank 1 is the best; ties share the mean of their ranks."""
    values = np.round(np.asarray(scores, np.float64), DIGITS) * (-1 if higher else 1)
    better = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    return [float(rank) for rank in better + (equal + 1) / 2]


def complete(scores: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[str]]:
    """Drop benchmarks and methods until no score is missing, most gaps first, methods before benchmarks.

    scores: benchmark -> method -> score.
    """
    benchmarks = list(scores)
    methods = list(dict.fromkeys(method for own in scores.values() for method in own))
    while gaps := [(b, m) for b in benchmarks for m in methods if m not in scores[b]]:
        shares = {("method", m): sum(m == other for _, other in gaps) / len(benchmarks) for m in methods}
        shares |= {("benchmark", b): sum(b == other for other, _ in gaps) / len(methods) for b in benchmarks}
        kind, name = max(reversed(shares), key=lambda key: (shares[key], key[0] == "method"))
        (methods if kind == "method" else benchmarks).remove(name)
    return benchmarks, methods


def ranking(scores: Mapping[str, Mapping[str, float]], higher: Mapping[str, bool]) -> Ranking | None:
    """Rank methods on every benchmark, and test the ranks; None if there is nothing to compare.

    scores: benchmark -> method -> score. higher: benchmark -> whether larger scores are better.
    """
    benchmarks, methods = complete(scores)
    if len(methods) < 2 or not benchmarks:
        return None
    table = np.array([ranked([scores[b][m] for m in methods], higher[b]) for b in benchmarks])  # (N, k)
    means = dict(zip(methods, table.mean(0).tolist(), strict=True))
    ordered = dict(sorted(means.items(), key=lambda item: item[1]))
    test, why = None, ""
    if len(methods) < 3 or len(benchmarks) < 2:
        why = "Friedman's test needs at least three methods and two benchmarks without a gap"
    else:
        try:
            test = friedman(table)
        except CoterieError as error:
            why = str(error)
    return Ranking(tuple(benchmarks), ordered, test, why)


def friedman(ranks: NDArray[np.float64]) -> Friedman:
    """ranks: (N, k), of k methods on N benchmarks."""
    stats = scipy_stats()
    n, k = ranks.shape
    if all(len(set(row)) == 1 for row in ranks.tolist()):
        raise CoterieError("all methods tie on all benchmarks, so there is nothing to test")
    statistic, p = (float(value) for value in stats.friedmanchisquare(*ranks.T))
    rest = n * (k - 1) - statistic
    f = (n - 1) * statistic / rest if rest > 1e-9 else math.inf
    return Friedman(statistic, p, f, float(stats.f.sf(f, k - 1, (k - 1) * (n - 1))), critical_difference(k, n))


def critical_difference(methods: int, benchmarks: int, level: float = LEVEL) -> float:
    """Nemenyi's: the studentized range divided by √2, times √(k (k + 1) / 6 N)."""
    q = float(scipy_stats().studentized_range.ppf(1 - level, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * benchmarks))


def scipy_stats() -> Any:
    try:
        import scipy.stats
    except ImportError:
        raise CoterieError("Friedman's test needs SciPy: pip install 'coterie[stats]'") from None
    return scipy.stats


def alike(ranks: Mapping[str, float], critical: float) -> list[list[str]]:
    """Longest runs of methods, ordered by rank, whose ends differ by less than the critical difference."""
    names = sorted(ranks, key=lambda name: ranks[name])
    runs: list[tuple[int, int]] = []
    for start in range(len(names)):
        end = start
        while end + 1 < len(names) and ranks[names[end + 1]] - ranks[names[start]] < critical:
            end += 1
        if end > start and (not runs or end > runs[-1][1]):
            runs.append((start, end))
    return [names[start : end + 1] for start, end in runs]
