"""ε against truths that do not come from the accountant: quadrature, closed forms, published numbers."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from coterie.core.errors import CoterieError
from coterie.privacy import Protection, accountant
from coterie.privacy.accountant import ORDERS, Spent, epsilon, exact_delta, exact_epsilon, most_drawn, renyi


def density(x: np.ndarray, mean: float, noise: float) -> np.ndarray:
    return np.exp(-((x - mean) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("chance", [0.01, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("noise", [0.8, 1.5, 4.0])
@pytest.mark.parametrize("order", [2, 5, 16])
def test_the_divergence_is_that_of_its_definition(chance: float, noise: float, order: int) -> None:
    """D_α = 1/(α-1) log ∫ p^α q^(1-α), both ways round; the larger one counts."""
    x = np.linspace(-30 * noise, 30 * noise + order, 400_001)
    with_it = (1 - chance) * density(x, 0, noise) + chance * density(x, 1, noise)
    without = density(x, 0, noise)
    seen = (with_it > 0) & (without > 0)
    found = []
    for p, q in ((with_it[seen], without[seen]), (without[seen], with_it[seen])):
        logs = order * np.log(p) + (1 - order) * np.log(q)
        found.append(math.log(np.trapezoid(np.exp(logs), x[seen])) / (order - 1))
    assert renyi(noise, chance, order) == pytest.approx(max(found), rel=1e-6)


def test_of_a_gaussian_it_is_the_closed_form() -> None:
    assert renyi(2.0, 1.0, 7) == 7 / 8
    assert Spent(3, 2.0).divergence(7) == 21 / 8


def test_the_published_number_of_the_moments_accountant() -> None:
    """Abadi et al. 2016, section 3.2: q = 0.01, σ = 4, 10,000 steps, δ = 1e-5: ε about 1.26, by δ = exp(αρ - ...)."""
    spent = Spent(10_000, 4.0, 0.01)
    as_published = min(spent.divergence(order) + math.log(1e5) / (order - 1) for order in ORDERS)
    assert as_published == pytest.approx(1.26, abs=0.01)
    assert 1.0 < epsilon([spent], 1e-5, "renyi") < as_published  # the conversion of 2020 is tighter


def test_exact_delta_is_the_integral() -> None:
    """δ(ε) = ∫ max(p - e^ε q, 0)."""
    x = np.linspace(-20, 22, 2_000_001)
    for shift, eps in ((0.5, 0.3), (1.0, 1.0), (2.0, 0.0)):
        gap = density(x, shift, 1.0) - math.exp(eps) * density(x, 0, 1.0)
        assert exact_delta(shift, eps) == pytest.approx(float(np.trapezoid(np.maximum(gap, 0), x)), rel=1e-6)
        assert exact_epsilon(shift, exact_delta(shift, eps)) == pytest.approx(eps, abs=1e-9)


@pytest.mark.parametrize("times", [1, 50, 2000])
def test_the_bound_is_above_the_exact_value_and_near_it(times: int) -> None:
    """A chance of nearly 1 goes the way of Rényi; 1 the exact one."""
    spent = Spent(times, 20.0, 1 - 1e-12)
    bound = min(spent.divergence(a) + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1) for a in ORDERS)
    exact = epsilon([Spent(times, 20.0)], 1e-5)
    assert exact < bound < 1.25 * exact + 0.1
    assert epsilon([spent], 1e-5) == pytest.approx(exact)  # the better one is taken


def test_mechanisms_add_up() -> None:
    one, two = Spent(3, 2.0), Spent(4, 5.0)
    assert epsilon([one, two], 1e-6) == pytest.approx(exact_epsilon(math.sqrt(3 / 4 + 4 / 25), 1e-6))
    for name in accountant.ACCOUNTANTS:
        apart = epsilon([Spent(2, 1.5, 0.1), Spent(3, 1.5, 0.1)], 1e-6, name)
        assert apart == pytest.approx(epsilon([Spent(5, 1.5, 0.1)], 1e-6, name), rel=1e-4)
    assert epsilon([one], 1e-6) < epsilon([one, two], 1e-6) < epsilon([one], 1e-6) + epsilon([two], 1e-6) + 1


def test_more_noise_fewer_draws_fewer_times_are_better() -> None:
    base = epsilon([Spent(100, 1.0, 0.1)], 1e-5)
    assert epsilon([Spent(100, 1.1, 0.1)], 1e-5) < base
    assert epsilon([Spent(100, 1.0, 0.05)], 1e-5) < base
    assert epsilon([Spent(90, 1.0, 0.1)], 1e-5) < base
    assert epsilon([Spent(100, 1.0, 0.1)], 1e-3) < base


def test_the_ends() -> None:
    assert epsilon([], 1e-5) == epsilon([Spent(0, 1.0)], 1e-5) == epsilon([Spent(9, 1.0, 0.0)], 1e-5) == 0
    assert epsilon([Spent(1, 0.0)], 1e-5) == math.inf
    assert epsilon([Spent(10**6, 0.05)], 1e-5) > 1e8  # no overflow
    assert epsilon([Spent(1, 1e6)], 1e-5) == 0
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(CoterieError, match="delta must be above 0"):
            epsilon([Spent(1, 1.0)], delta)


@pytest.mark.parametrize(("expected", "size"), [(1, 1000), (8, 60), (50, 200)])
def test_more_than_that_are_hardly_drawn(expected: int, size: int) -> None:
    """Against the binomial distribution itself."""
    most, share = most_drawn(expected, 1e-6), expected / size
    beyond = sum(math.comb(size, k) * share**k * (1 - share) ** (size - k) for k in range(most + 1, size + 1))
    assert 0 < beyond <= 1e-6


def test_without_sampling_both_accountants_give_the_hand_computed_value() -> None:
    """δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) with μ = √T / z. T = 4, z = 2, ε = 1: Φ(-0.5) - e Φ(-1.5)."""
    delta = 0.3085375387 - math.e * 0.0668072013
    for name in accountant.ACCOUNTANTS:
        assert epsilon([Spent(4, 2.0)], delta, name) == pytest.approx(1.0, abs=1e-8)
    assert accountant.pld_epsilon([Spent(4, 2.0)], delta, 1e-4) == pytest.approx(1.0, abs=1e-3)


def test_of_one_sampled_mechanism_pld_is_the_hand_computed_value() -> None:
    """Removing a contribution: P = (1 - q) N(0, 1) + q N(1, 1) against N(0, 1). Where P/Q = e^ε, x solves
    1 - q + q exp(x - 1/2) = e^ε; δ = P(X > x) - e^ε Q(X > x). q = 1/2, ε = log 2: x = log 3 + 1/2."""
    x = math.log(3) + 0.5
    above, without = (0.5 * math.erfc(t / math.sqrt(2)) for t in (x - 1, x))
    delta = 0.5 * without + 0.5 * above - 2 * without
    found = epsilon([Spent(1, 1.0, 0.5)], delta, "pld")
    assert found == pytest.approx(math.log(2), abs=1e-3)
    assert found >= math.log(2) - 1e-9  # an upper bound
    assert epsilon([Spent(1, 1.0, 0.5)], delta, "renyi") > found


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("chance", [0.002, 0.1, 0.9])
@pytest.mark.parametrize("noise", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("times", [1, 100, 20_000])
def test_pld_is_never_above_renyi(times: int, noise: float, chance: float, delta: float) -> None:
    spent = [Spent(times, noise, chance), Spent(3, 9.0)]
    assert epsilon(spent, delta, "pld") <= epsilon(spent, delta, "renyi")


def test_pld_is_clearly_tighter_where_training_runs_are() -> None:
    """Numbers of dp-accounting 0.6 on its finest default grid (1e-4)."""
    for spent, published in ((Spent(1000, 1.0, 0.01), 1.8282), (Spent(36, 2.0, 0.4), 6.1859)):
        assert epsilon([spent], 1e-5, "pld") == pytest.approx(published, rel=2e-3)
        assert epsilon([spent], 1e-5, "renyi") > 1.05 * published


def test_the_default_is_the_tightest_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = [Spent(100, 1.0, 0.1)]
    assert accountant.best_accountant() == Protection(dp="sample").dp_accountant == "pld"
    assert epsilon(spent, 1e-5) == epsilon(spent, 1e-5, "pld")
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert accountant.best_accountant() == Protection(dp="sample").dp_accountant == "renyi"
    assert epsilon(spent, 1e-5) == epsilon(spent, 1e-5, "renyi")
    with pytest.raises(CoterieError, match=r"needs dp-accounting: pip install 'coterie\[dp\]'"):
        epsilon(spent, 1e-5, "pld")


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(CoterieError, match="unknown dp-accountant 'rdp'"):
        Protection(dp="sample", dp_accountant="rdp")
    assert Protection().dp_accountant is None  # a run without noise records none
