"""Ranks and margins of a table's methods: Kendall's tau against the paper, and how far its own method is ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.analysis.significance import Spread, student
from coterie.papers.verdicts import ENOUGH, RunNoise

RESAMPLED = 2000
TIE = 1e-9  # two equal taus differ by less


class Estimate(NamedTuple):
    """A number with its 95 % interval; None: no interval."""

    value: float
    low: float | None
    high: float | None


class Agreement(NamedTuple):
    """Kendall's tau of our order and the published one, and the range it has in 95 % of the cases if the published
    numbers are the true means and our runs differ from them by noise only; None: no noise was measured."""

    tau: float
    low: float | None
    high: float | None

    @property
    def expected(self) -> bool | None:
        """Whether the order differs from the published one by no more than noise explains."""
        return None if self.low is None else self.tau > self.low - TIE


def kendall(first: Sequence[float], second: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Kendall's tau-b of (n,) and (..., n): pairs in the same order minus pairs in the opposite order, corrected for
    ties."""
    i, j = np.triu_indices(len(first), 1)
    a, b = (np.sign(v[..., i] - v[..., j]) for v in (np.asarray(first), np.asarray(second)))
    pairs = np.sqrt(np.abs(a).sum(-1) * np.abs(b).sum(-1))
    found: NDArray[np.float64] = np.where(pairs > 0, (a * b).sum(-1) / np.maximum(pairs, 1), np.nan)
    return found


def agreement(published: Sequence[float], ours: Sequence[Spread], noise: RunNoise | None) -> Agreement:
    """ours: with the half intervals that the noise gives. Noise is added to the published numbers, not to our means,
    which already contain it; its size is uncertain too, and common to all methods."""
    tau = float(kendall(published, [own.mean for own in ours]))
    halves = [own.half for own in ours if own.half is not None]
    if noise is None or len(halves) < len(ours):
        return Agreement(tau, None, None)
    draw = np.random.default_rng(0)
    sizes = np.sqrt(noise.freedom / draw.chisquare(noise.freedom, (RESAMPLED, 1))) / student(noise.freedom)
    added = draw.standard_normal((RESAMPLED, len(ours))) * sizes * np.asarray(halves)
    low, high = np.quantile(kendall(published, np.asarray(published) + added), [0.025, 0.975])
    return Agreement(tau, float(low), float(high))


def margin(hero: dict[int, float], rival: dict[int, float], noise: RunNoise | None) -> Estimate:
    """How far the first is ahead, over the seeds that both have, and its 95 % interval.

    From ENOUGH seeds on, Student's t interval of the paired differences. Below, the pooled noise of two runs, or the
    differences' own if that is larger. Both ran on the same partitions, whose draw is not part of the interval.
    """
    shared = sorted(hero.keys() & rival.keys())
    if not shared:
        means = [math.fsum(own.values()) / len(own) for own in (hero, rival)]
        return Estimate(means[0] - means[1], None, None)
    found = Spread.of([hero[seed] - rival[seed] for seed in shared])
    half = found.half
    if len(shared) < ENOUGH:
        if noise is None:
            return Estimate(found.mean, None, None)
        half = student(noise.freedom) * max(found.std or 0.0, math.sqrt(2) * noise.std) / math.sqrt(len(shared))
    assert half is not None
    return Estimate(found.mean, found.mean - half, found.mean + half)
