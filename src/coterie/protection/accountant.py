"""What noise is worth: the (ε, δ) of many Gaussian mechanisms, one after the other.

A Gaussian mechanism gives a sum to which one neighbour contributes at most C, plus noise of deviation zC; z is its
multiplier. Sampled, it does so with a sum over those who are drawn, each independently with the same chance.

Mechanisms that are not sampled compose to one Gaussian mechanism, of which ε is known exactly (Balle and Wang, 2018).
For the others it is Rényi's divergence that adds up: Mironov, Talwar, Zhang: Rényi Differential Privacy of the Sampled
Gaussian Mechanism, 2019, at integer orders; turned into ε as in Canonne, Kamath, Steinke, 2020, proposition 12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from coterie.core.errors import CoterieError

ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 257, 16), 320, 384, 512, 768, 1024)


class Spent(NamedTuple):
    """Gaussian mechanisms of one kind."""

    times: int
    noise: float  # z
    chance: float = 1.0  # of taking part in one of them

    def divergence(self, order: int) -> float:
        return self.times * renyi(self.noise, self.chance, order)


def renyi(noise: float, chance: float, order: int) -> float:
    """Rényi's divergence between the outcomes with a neighbour and without, the larger way round."""
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


def epsilon(spent: Sequence[Spent], delta: float) -> float:
    """ε of all of them together, for this δ."""
    if not 0 < delta < 1:
        raise CoterieError(f"delta must be above 0 and below 1, not {delta}")
    used = [part for part in spent if part.times and part.chance > 0]
    if not used:
        return 0.0
    if any(part.noise <= 0 for part in used):
        return math.inf
    always = exact_epsilon(math.sqrt(sum(part.times / part.noise**2 for part in used)), delta)
    if all(part.chance >= 1 for part in used):
        return always
    sums = [(order, sum(part.divergence(order) for part in used)) for order in ORDERS]
    found: list[float] = [rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1) for order, rho in sums]
    return max(min(always, *found), 0.0)  # being drawn by chance never reveals more than taking part always


def exact_delta(shift: float, epsilon: float) -> float:
    """δ of one Gaussian mechanism whose outcome shifts by so many deviations of its noise."""
    beyond = upper_tail(epsilon / shift + shift / 2)
    second = math.exp(epsilon + math.log(beyond)) if beyond > 0 else 0.0  # left out where it is too small to compute
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
    """Chance that a standard normal number is above x."""
    return math.erfc(x / math.sqrt(2)) / 2


def most_drawn(expected: int, chance: float) -> int:
    """A number that a sum of independent draws with this mean exceeds with at most this chance, by Chernoff's bound."""
    limit, most = -math.log(chance), expected + 1
    while most * math.log(most / expected) - most + expected < limit:
        most += 1
    return most
