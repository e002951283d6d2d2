"""Statistics: intervals over seeds, paired tests, and Holm's correction for multiple tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EXACT = 25  # pairs up to which the distribution of ranks is enumerated


class Spread(NamedTuple):
    """Mean and spread of several runs."""

    mean: float
    std: float | None  # of the sample; None: one run only
    half: float | None  # the 95 % interval is mean ± half

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        n, mean = len(values), math.fsum(values) / len(values)
        if n < 2:
            return Spread(mean, None, None)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
        return Spread(mean, std, student(n - 1) * std / math.sqrt(n))


def student(freedom: int, level: float = 0.95) -> float:
    """t with P(-t < T < t) = level, for Student's T with these degrees of freedom."""
    low, high = 0.0, 1.0
    while inside(high, freedom) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < level else (low, middle)
    return high


def inside(t: float, freedom: int) -> float:
    """P(-t < T < t), by the finite series in the angle θ with tan θ = t / √freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):  # k: power of the cosine, plus one
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


class Paired(NamedTuple):
    pairs: int  # with a difference; ties are dropped
    p: float  # two-sided
    up: bool  # whether positive differences have the larger sum of ranks
    exact: bool


def wilcoxon(differences: Sequence[float]) -> Paired:
    """Wilcoxon's signed-rank test of paired differences; ties get their mean rank. Exact for few pairs, else the normal
    approximation with its variance corrected for ties."""
    d = np.round(np.asarray(differences, np.float64), 9)  # 0.35 - 0.30 and 0.25 - 0.20 tie
    d = d[d != 0]
    n = len(d)
    if n == 0:
        return Paired(0, 1.0, False, True)
    _, group, counts = np.unique(np.abs(d), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # rank of the last one of each group of equals
    doubled = (2 * last - counts + 1)[group]  # twice the ranks, which are halves where an even number is equal
    plus, middle = int(doubled[d > 0].sum()), n * (n + 1) / 2
    if n <= EXACT:
        return Paired(n, exact_p(doubled.tolist(), plus), plus > middle, True)
    variance = n * (n + 1) * (2 * n + 1) / 6 - float((counts**3 - counts).sum()) / 12
    z = (plus - middle) / math.sqrt(variance)
    return Paired(n, math.erfc(abs(z) / math.sqrt(2)), plus > middle, False)


def t_test(differences: Sequence[float]) -> Paired:
    """Student's paired t test, two-sided. Equal differences have no spread: p is 0, or 1 if all are zero."""
    n, spread = len(differences), Spread.of(differences) if differences else Spread(0.0, None, None)
    if spread.std is None:
        return Paired(n, 1.0, spread.mean > 0, True)
    if spread.std <= 1e-12 * abs(spread.mean) or spread.std == 0:
        return Paired(n, float(spread.mean == 0), spread.mean > 0, True)
    t = abs(spread.mean) / (spread.std / math.sqrt(n))
    return Paired(n, max(0.0, 1 - inside(t, n - 1)), spread.mean > 0, True)


def wilson(correct: int, total: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's 95 % score interval of correct / total: (low, high) in 0..1."""
    if total < 1:
        return 0.0, 1.0
    share, weight = correct / total, z * z / total
    middle = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / total + weight / (4 * total)) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def exact_p(ranks: Sequence[int], plus: int) -> float:
    """Two-sided p, from the number of sign choices that give each sum of positive ranks."""
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    tail = min(sum(ways[: plus + 1]), sum(ways[plus:]))
    return float(min(1.0, 2 * tail / 2 ** len(ranks)))


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected by Holm's step-down: tested at 5 %, their family-wise error is at most 5 %."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    corrected, highest = [0.0] * len(ps), 0.0
    for step, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - step) * ps[i]))
        corrected[i] = highest
    return corrected
