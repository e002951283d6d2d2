"""Sources of noise for differential privacy: two types that are not interchangeable.

`ReproducibleNoise` is a hash of the run's seed, which anyone can invert or repeat. Simulations use it, because they
must be repeatable; it gives no privacy. `SecretNoise` comes from the operating system's cryptographic generator and is
different on every call. Devices, and the server of a federation of devices, accept only this type.

`SecretNoise` works on a lattice, so that floating-point rounding leaks nothing (Mironov: On Significance of the Least
Significant Bits for Differential Privacy, 2012). For noise of standard deviation σ the lattice step is γ = σ / 2^40.

    1. Every contribution (a sample's gradient, a client's update) is scaled in float64 to a norm of at most
       C (1 - 2^-20) and rounded toward zero to integer multiples of γ, which never increases its norm. So its norm is
       at most C, and the sensitivity needs no correction for rounding.
    2. Contributions are added as 64-bit integers. This is exact in any order.
    3. The noise is ⌊N(0, 2^80)⌋ for every number. For an integer k, k + ⌊X⌋ = ⌊k + X⌋, so the result is a Gaussian
       mechanism followed by rounding down: all theorems about the continuous Gaussian mechanism hold unchanged.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core import random
from coterie.core.errors import CoterieError
from coterie.core.method import Method
from coterie.core.tree import Tree
from coterie.core.wrapper import Around

BITS = 40  # the standard deviation of the noise is 2^BITS lattice steps
MARGIN = 2.0**-20  # of norms, for float64 rounding errors in their computation
TIE = 2.0**-33  # a comparison in float64 that is closer than this is decided exactly
MORE = 192  # additional random bits of an exact decision, after the first 40 or 64
CHUNK = 2**18  # candidates per batch
LARGEST = 2.0**62  # of integers that are added
EXACT = Context(prec=120)


class Noise(ABC):
    """Randomness of a private mechanism. key: identifies the draw, for reproducible noise."""

    @abstractmethod
    def bits(self, key: Tensor, places: Tensor) -> Tensor:
        """63 random bits for each place, as non-negative int64."""

    @abstractmethod
    def sums(self, key: Tensor, parts: Sequence[Tree], bound: float, noise: float) -> Tree:
        """The sum over all rows of the parts, by name, plus Gaussian noise of standard deviation noise · bound.

        parts: trees with a leading axis; row j of all tensors of a part is one contribution, of norm at most bound.
        """


@dataclass(frozen=True)
class ReproducibleNoise(Noise):
    """Noise determined by the key, for simulations: it measures the cost of noise and gives no privacy."""

    def bits(self, key: Tensor, places: Tensor) -> Tensor:
        return random.bits(key, places)

    def sums(self, key: Tensor, parts: Sequence[Tree], bound: float, noise: float) -> Tree:
        found = {}
        for number, (name, rows) in enumerate(parts[0].items()):
            drawn = noise * bound * random.normal(random.derive(key, number), rows[0])
            found[name] = sum(part[name].sum(0) for part in parts) + drawn
        return found


@dataclass(frozen=True)
class SecretNoise(Noise):
    """Noise from the operating system's cryptographic generator, fresh on every call. Keys are ignored."""

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def bits(self, key: Tensor, places: Tensor) -> Tensor:
        words = np.frombuffer(self.random_bytes(8 * places.numel()), np.uint64) >> np.uint64(1)
        return torch.from_numpy(words.astype(np.int64)).view(places.shape).to(places.device)

    def sums(self, key: Tensor, parts: Sequence[Tree], bound: float, noise: float) -> Tree:
        step = lattice_step(noise * bound)
        check_range(bound / step * sum(len(next(iter(part.values()))) for part in parts), noise)
        totals = [
            {name: exact_sum(t, bound / step) for name, t in on_lattice(part, bound, step).items()} for part in parts
        ]
        return {
            name: self.noisy(torch.stack([total[name] for total in totals]).sum(0), step).to(t.dtype)
            for name, t in parts[0].items()
        }

    def noisy(self, total: Tensor, step: float) -> Tensor:
        """An integer number of steps, plus noise of 2^BITS steps, in float64."""
        drawn = torch.from_numpy(self.gaussian(total.numel())).view(total.shape).to(total.device)
        return (total + drawn).double() * step

    def gaussian(self, count: int) -> NDArray[np.int64]:
        """(count,) independent ⌊2^BITS X⌋, X standard normal, by algorithm N of Karney (2016), on vectors.

        |X| = k + u: k is drawn with chance ∝ exp(-k²/2), u is uniform in [0, 1), and both are accepted with chance
        exp(-u (2k + u) / 2). Comparisons that float64 cannot decide for certain are made with 192 more random bits
        and 120 digits, so the total variation distance from the exact distribution is below 2^-220 for each number.
        """
        found: list[NDArray[np.int64]] = []
        left = count
        while left > 0:
            accepted = self._candidates(min(CHUNK, left + left // 2 + 16))[:left]
            found.append(accepted)
            left -= len(accepted)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _candidates(self, count: int) -> NDArray[np.int64]:
        """The accepted ones of `count` candidates."""
        words = np.frombuffer(self.random_bytes(24 * count), np.uint64).reshape(3, count)
        first, second, third = words
        cuts, _ = cumulated()
        k = np.searchsorted(cuts, first, side="left").astype(np.int64)
        for at in np.flatnonzero(cuts[np.minimum(k, len(cuts) - 1)] == first):  # as many cuts are below: it is one
            k[at] = exact_k(int(first[at]))
        fraction = (second & np.uint64(2**BITS - 1)).astype(np.int64)
        u = fraction * 2.0**-BITS
        chance, drawn = np.exp(-u * (2 * k + u) / 2), third.astype(np.float64) * 2.0**-64
        accepted = drawn < chance
        for at in np.flatnonzero(np.abs(drawn - chance) <= TIE):
            accepted[at] = exactly_accepted(int(k[at]), int(fraction[at]), int(third[at]))
        size = (k << BITS) + fraction
        negative = (second >> np.uint64(63)).astype(bool)
        found: NDArray[np.int64] = np.where(negative, -size - 1, size)[accepted]
        return found


def lattice_step(deviation: float) -> float:
    """γ for noise of this standard deviation."""
    return deviation * 2.0**-BITS


def check_range(largest: float, noise: float) -> None:
    """Refuse sums that may exceed 64-bit integers."""
    if not largest < LARGEST:
        raise CoterieError(
            f"the noise multiplier {noise:g} is too small for this many samples: their sum exceeds the range of the "
            "lattice of secret noise; use a larger --dp-noise or --dp-statistics"
        )


def on_lattice(rows: Tree, bound: float, step: float) -> Tree:
    """Rows in lattice steps, as integers in float64; the norm of each row over all tensors is at most the bound.

    A row that is not finite counts as zero.
    """
    flat = {name: t.detach().reshape(len(t), -1) for name, t in rows.items()}
    squares = [torch.linalg.vector_norm(t, dim=1, dtype=torch.float64).square() for t in flat.values()]
    norm = torch.stack(squares).sum(0).sqrt()  # (n,)
    finite = norm.isfinite()
    scale = torch.where(finite, (bound * (1 - MARGIN) / norm.clamp_min(1e-300)).clamp_max(1), 0.0) / step
    found = {}
    for name, t in flat.items():
        whole = torch.mul(t, scale[:, None]).trunc_()
        found[name] = (whole if bool(finite.all()) else whole.masked_fill_(~finite[:, None], 0.0)).view(
            rows[name].shape
        )
    return found


def exact_sum(whole: Tensor, largest: float) -> Tensor:
    """(...) int64 sum over rows (n, ...) of integers in float64, none above the largest."""
    return whole.sum(0).long() if len(whole) * largest < 2.0**53 else whole.long().sum(0)


@cache
def cumulated() -> tuple[NDArray[np.uint64], tuple[int, ...]]:
    """⌊2^64 P(K <= k)⌋ and ⌊2^256 P(K <= k)⌋ for P(k) ∝ exp(-k²/2), up to where 256 bits round to 1."""
    with localcontext(EXACT):
        weights = [(Decimal(-k * k) / 2).exp() for k in range(40)]
        total = sum(weights)
        shares = [sum(weights[: k + 1]) / total for k in range(20)]
        wide = tuple(int(share * 2**256) for share in shares)
    return np.array([cut >> 192 for cut in wide], np.uint64), wide


def exact_k(word: int) -> int:
    """k of a draw that begins with this word, if 64 bits do not determine it."""
    drawn = (word << MORE) | secrets.randbits(MORE)
    return sum(cut <= drawn for cut in cumulated()[1])


def exactly_accepted(k: int, fraction: int, word: int) -> bool:
    """Whether k + u is accepted, given the leading bits of u and of the draw."""
    with localcontext(EXACT):
        u = Decimal((fraction << MORE) | secrets.randbits(MORE)) / 2 ** (BITS + MORE)
        drawn = Decimal((word << MORE) | secrets.randbits(MORE)) / 2 ** (64 + MORE)
        return bool(drawn < (-u * (2 * k + u) / 2).exp())


def layers(method: Method[Any, Any, Any, Any]) -> list[Around]:
    """The layers around a method, outermost first."""
    return [method, *layers(method.inner)] if isinstance(method, Around) else []


def check_secret(method: Method[Any, Any, Any, Any]) -> None:
    """Refuse a method whose noise can be predicted."""
    for layer in layers(method):
        source = getattr(layer, "source", None)
        if isinstance(source, Noise) and not isinstance(source, SecretNoise):
            raise CoterieError(
                f"{type(layer).__name__} of {method.title} has {type(source).__name__}, which is predictable: a device "
                "adds SecretNoise only; build the method with Protection.deployed"
            )
