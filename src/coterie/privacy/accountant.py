"""Privacy accounting: the (ε, δ) of a composition of Gaussian mechanisms.

A Gaussian mechanism releases a sum to which one neighbor contributes at most C, plus noise of standard deviation zC;
z is the noise multiplier. A sampled mechanism sums over contributions that are each drawn independently with the same
probability (Poisson sampling). Neighbors differ by adding or removing one contribution.

Without sampling, the composition is one Gaussian mechanism, whose ε is exact (Balle and Wang, 2018). With sampling
there are two accountants, both upper bounds:

renyi   built in. Rényi divergences at integer orders add up (Mironov, Talwar, Zhang: Rényi Differential Privacy of the
        Sampled Gaussian Mechanism, 2019) and convert to ε by Canonne, Kamath, Steinke, 2020, proposition 12.
pld     privacy loss distributions, computed by dp-accounting (`pip install 'coterie[dp]'`). Never above renyi; ε is
        5 to 40 % smaller for typical training runs.

A run uses one accountant, records its name, and keeps it when it is resumed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from collections.abc import Sequence
from typing import NamedTuple

from coterie.core.errors import CoterieError

ACCOUNTANTS = ("pld", "renyi")
ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 257, 16), 320, 384, 512, 768, 1024)
MOST_PLD = 1e4  # a larger ε by Rényi guarantees nothing, and its distribution needs gigabytes
GRID = 1e4  # points of a loss distribution between 0 and ε
FINEST, COARSEST = 1e-6, 1e-2  # distance of these points


class Spent(NamedTuple):
    """Identical Gaussian mechanisms."""

    times: int
    noise: float  # z
    chance: float = 1.0  # sampling probability

    def divergence(self, order: int) -> float:
        return self.times * renyi(self.noise, self.chance, order)


def best_accountant() -> str:
    """The tightest accountant that is installed."""
    return "pld" if importlib.util.find_spec("dp_accounting") else "renyi"


def describe(spent: Sequence[Spent], accountant: str) -> str:
    """How `epsilon` computes this composition, for the record of a run."""
    if not sampled(spent):
        return "exact (Gaussian mechanism)"
    return f"pld (dp-accounting {importlib.metadata.version('dp-accounting')})" if accountant == "pld" else "renyi"


def epsilon(spent: Sequence[Spent], delta: float, accountant: str | None = None) -> float:
    """ε of the whole composition at this δ. accountant: one of ACCOUNTANTS; default: `best_accountant()`."""
    if not 0 < delta < 1:
        raise CoterieError(f"delta must be above 0 and below 1, got {delta}")
    used = [part for part in spent if part.times and part.chance > 0]
    if not used:
        return 0.0
    if any(part.noise <= 0 for part in used):
        return math.inf
    unsampled = exact_epsilon(math.sqrt(sum(part.times / part.noise**2 for part in used)), delta)
    if not sampled(used):
        return unsampled
    bound = min(unsampled, renyi_epsilon(used, delta))  # sampling never reveals more than no sampling
    if (accountant or best_accountant()) == "pld" and 0 < bound < MOST_PLD:
        return min(bound, pld_epsilon(used, delta, min(max(bound / GRID, FINEST), COARSEST)))
    return bound


def sampled(spent: Sequence[Spent]) -> bool:
    return any(part.chance < 1 for part in spent)


def renyi_epsilon(spent: Sequence[Spent], delta: float) -> float:
    sums = [(order, sum(part.divergence(order) for part in spent)) for order in ORDERS]
    found: list[float] = [rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1) for order, rho in sums]
    return max(min(found), 0.0)


def renyi(noise: float, chance: float, order: int) -> float:
    """Rényi divergence between the outputs with and without a contribution, in the larger of the two directions."""
    if chance >= 1:
        return order / (2 * noise**2)
    if chance <= 0:
        return 0.0
    terms = [  # log of C(α, k) (1 - q)^(α - k) q^k exp(k (k - 1) / 2z²)
        math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        + (order - k) * math.log1p(-chance) + k * math.log(chance) + k * (k - 1) / (2 * noise**2)
        for k in range(order + 1)
    ]  # fmt: skip
    top = max(terms)
    return max((top + math.log(math.fsum(math.exp(t - top) for t in terms))) / (order - 1), 0.0)


def pld_epsilon(spent: Sequence[Spent], delta: float, interval: float) -> float:
    """ε by privacy loss distributions on a grid of this spacing; rounding is pessimistic, so it is an upper bound."""
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld
    except ImportError:
        raise CoterieError(
            "the pld accountant needs dp-accounting: pip install 'coterie[dp]', or use --dp-accountant renyi"
        ) from None
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for times, noise, chance in spent:
        event = GaussianDpEvent(noise)
        accountant.compose(PoissonSampledDpEvent(chance, event) if chance < 1 else event, times)
    return float(accountant.get_epsilon(delta))


def exact_delta(shift: float, epsilon: float) -> float:
    """δ of one Gaussian mechanism whose output shifts by this many standard deviations of its noise."""
    beyond = upper_tail(epsilon / shift + shift / 2)
    second = math.exp(epsilon + math.log(beyond)) if beyond > 0 else 0.0  # dropped where it underflows
    return upper_tail(epsilon / shift - shift / 2) - second


def exact_epsilon(shift: float, delta: float) -> float:
    low, high = 0.0, shift**2 / 2 + 40 * shift  # there, δ is below 1e-300
    if exact_delta(shift, low) <= delta:
        return 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if exact_delta(shift, middle) > delta else (low, middle)
    return high


def upper_tail(x: float) -> float:
    """P(X > x) for a standard normal X."""
    return math.erfc(x / math.sqrt(2)) / 2


def most_drawn(expected: int, chance: float) -> int:
    """A count that independent draws with this mean exceed with at most this probability (Chernoff bound)."""
    limit, most = -math.log(chance), expected + 1
    while most * math.log(most / expected) - most + expected < limit:
        most += 1
    return most
