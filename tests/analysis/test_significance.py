"""Statistics against printed tables, other formulas, and counting by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from coterie.analysis.significance import Spread, holm, student, t_test, wilcoxon, wilson


@pytest.mark.parametrize(
    ("freedom", "level", "t"),
    [
        (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (5, 0.95, 2.571), (9, 0.95, 2.262),
        (10, 0.95, 2.228), (29, 0.95, 2.045), (30, 0.95, 2.042), (120, 0.95, 1.980), (4, 0.99, 4.604), (7, 0.9, 1.895),
    ],
)  # fmt: skip
def test_students_table(freedom: int, level: float, t: float) -> None:
    assert student(freedom, level) == pytest.approx(t, abs=5e-4)


def test_spread_by_hand() -> None:
    assert Spread.of([80.0]) == Spread(80.0, None, None)
    found = Spread.of([1.0, 2.0, 3.0])
    assert (found.mean, found.std) == (2.0, 1.0)
    assert found.half == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)


# The largest smaller sum of ranks that is significant, two-sided, as tables print it: n -> at 5 %, at 1 %.
CRITICAL = {
    8: (3, 0), 9: (5, 1), 10: (8, 3), 11: (10, 5), 12: (13, 7), 13: (17, 9), 14: (21, 12), 15: (25, 15), 16: (29, 19),
    17: (34, 23), 18: (40, 27), 19: (46, 32), 20: (52, 37), 21: (58, 42), 22: (65, 48), 23: (73, 54), 24: (81, 61),
    25: (89, 68),
}  # fmt: skip


def with_sum(n: int, total: int) -> list[float]:
    """Differences 1 .. n whose positive ranks sum to the total."""
    signs = [-1] * n
    for rank in range(n, 0, -1):
        if rank <= total:
            signs[rank - 1], total = 1, total - rank
    return [sign * (rank + 1.0) for rank, sign in enumerate(signs)]


@pytest.mark.parametrize("n", CRITICAL)
def test_wilcoxons_table(n: int) -> None:
    for level, critical in zip((0.05, 0.01), CRITICAL[n], strict=True):
        assert wilcoxon(with_sum(n, critical)).p <= level < wilcoxon(with_sum(n, critical + 1)).p


def test_exact_by_counting_all_signs() -> None:
    d = np.array([0.3, -0.1, 0.9, 1.4, -0.6, 2.0, 0.2])
    ranks = np.abs(d).argsort().argsort() + 1
    seen = abs(ranks[d > 0].sum() - 14)
    sums = [ranks[np.array(signs)].sum() for signs in itertools.product((True, False), repeat=7)]
    assert wilcoxon(d.tolist()).p == pytest.approx(np.mean([abs(s - 14) >= seen for s in sums]))


def test_darwins_plants() -> None:
    """Heights of crossed and self-fertilised maize: p as statistics packages print it for these."""
    d = [6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75]
    found = wilcoxon(d)
    assert (found.pairs, found.exact) == (15, True)
    assert found.p == pytest.approx(0.041259765625)


@pytest.mark.parametrize("seed", range(5))
def test_exact_with_ties_by_counting_all_signs(seed: int) -> None:
    """Accuracies of few samples tie. Ranks of equals are their mean: of 1, 1, 2, 2, 2 they are 1.5, 1.5, 4, 4, 4."""
    d = np.random.default_rng(seed).integers(-3, 6, 9) / 10
    d = d[d != 0]
    size = np.abs(d)
    ranks = np.array([(size < s).sum() + ((size == s).sum() + 1) / 2 for s in size])
    middle = ranks.sum() / 2
    seen = abs(ranks[d > 0].sum() - middle)
    sums = [ranks[np.array(signs)].sum() for signs in itertools.product((True, False), repeat=len(d))]
    found = wilcoxon(d.tolist())
    assert found.exact
    assert found.p == pytest.approx(np.mean([abs(s - middle) >= seen - 1e-9 for s in sums]))
    assert found.up == (ranks[d > 0].sum() > middle)


def test_few_pairs_cannot_be_significant() -> None:
    """Five pairs that all say the same come about by chance in 2 of 32 cases, tied or not."""
    assert wilcoxon([0.02] * 5).p == wilcoxon([0.01, 0.02, 0.03, 0.04, 0.05]).p == 2 / 32


def test_the_direction_is_that_of_the_ranks() -> None:
    found = wilcoxon([-0.01 - 0.0001 * i for i in range(18)] + [0.5, 0.6])  # their mean is positive
    assert found.p < 0.05
    assert not found.up


def test_equal_sizes_make_it_the_sign_test() -> None:
    """If all differences tie, z is (n₊ - n₋) / √n."""
    z = (30 - 10) / math.sqrt(40)
    found = wilcoxon([0.05] * 30 + [-0.05] * 10 + [0.0] * 5)
    assert (found.pairs, found.exact) == (40, False)
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)))


def test_normal_approximation_is_near_the_exact_one() -> None:
    draw = np.random.default_rng(3)
    d = draw.normal(0.3, 1, 25)
    exact = wilcoxon(d.tolist())
    tied = wilcoxon([*d.tolist(), float(d[0]), -float(d[0])])  # 27: no longer exact
    assert exact.exact
    assert not tied.exact
    assert tied.p == pytest.approx(exact.p, abs=0.05)


def test_rounding_makes_no_ranks() -> None:
    d = [0.35 - 0.30, 0.25 - 0.20, 0.10 - 0.15, 0.9]  # three are equal but for rounding
    assert wilcoxon(d) == wilcoxon([5, 5, -5, 90])
    assert wilcoxon([0.1 + 0.2 - 0.3] * 4).pairs == 0
    assert wilcoxon([]).p == 1


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


# Against scipy


@pytest.mark.parametrize("seed", range(5))
def test_wilcoxon_as_in_scipy(seed: int) -> None:
    """Exact for few pairs without ties; for many the normal approximation, ties or not."""
    draw = np.random.default_rng(seed)
    few, many = draw.normal(0.3, 1, 18), draw.integers(-5, 8, 60) / 100
    assert wilcoxon(few.tolist()).p == pytest.approx(stats.wilcoxon(few, method="exact").pvalue, abs=1e-12)
    expected = stats.wilcoxon(many, method="asymptotic", correction=False, zero_method="wilcox").pvalue
    assert wilcoxon(many.tolist()).p == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 31])
def test_t_test_as_in_scipy(n: int) -> None:
    draw = np.random.default_rng(n)
    a, b = draw.normal(0.8, 0.02, n), draw.normal(0.79, 0.02, n)
    found, expected = t_test((a - b).tolist()), stats.ttest_rel(a, b)
    assert found.p == pytest.approx(expected.pvalue, abs=1e-12)
    assert (found.pairs, found.up) == (n, expected.statistic > 0)


def test_t_test_without_spread() -> None:
    assert t_test([0.1, 0.1, 0.1]).p == 0
    assert t_test([0.0, 0.0]).p == 1
    assert t_test([0.3]).p == 1  # one pair shows nothing
    assert t_test([]).p == 1


@pytest.mark.parametrize(("correct", "total"), [(0, 5), (5, 5), (3, 4), (17, 20), (1, 1), (450, 500)])
def test_wilson_as_in_scipy(correct: int, total: int) -> None:
    expected = stats.binomtest(correct, total).proportion_ci(method="wilson")
    assert wilson(correct, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_of_no_samples() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
