"""Verdicts by equivalence: whether the 95 % interval of our mean lies within a band around the published number.

The noise of a dataset is pooled over all cells that were run several times: with several seeds on one partition, and,
where partitions are random, with several draws. `tools/ledger` measures it from the result files and writes noise.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from coterie.analysis.significance import Spread, student
from coterie.core.validation import MappingReader, read_yaml
from coterie.papers.recipes import Published

MET, OFF, UNDECIDED, NOT_RUN, REDUCED = "met", "off", "undecided", "not run", "reduced"
WIDEST = 1.5  # points on each side of the published number
REPEATABILITY = 1.959964 * math.sqrt(2)  # 95 % of the differences of two single runs are below this many std (ISO 5725)
ENOUGH = 5  # runs from which a cell's own standard deviation decides
SEEDS, DRAWS = "seeds", "draws"  # what differs between runs: the seed of training; the partition too
NOISE = Path(__file__).parent / "noise.yaml"


class RunNoise(NamedTuple):
    """Pooled standard deviation between runs, in points."""

    std: float
    freedom: int  # effective degrees of freedom
    cells: int  # that were pooled
    measured_in: tuple[str, ...] = ()  # recipes whose settings have repeated runs; it is applied to the others

    @property
    def band(self) -> float:
        """Largest difference that counts as equal."""
        return min(WIDEST, REPEATABILITY * self.std)


Noises = Mapping[tuple[str, str], RunNoise]  # dataset, SEEDS or DRAWS


class Reproduced(NamedTuple):
    """The paper's number and ours, in percent."""

    published: Published | None
    ours: Spread | None  # None: not run; half: of the interval that decides, None if there is none
    difference: float | None
    verdict: str
    band: float | None = None  # points on each side of the published number


@cache
def measured_noise() -> Noises:
    """The noise that comes with Coterie."""
    return read_yaml(NOISE, read_noise)


def read_noise(content: Any) -> Noises:
    found = {}
    for dataset, kinds in MappingReader("", content or {}).left.items():
        for kind, entry in MappingReader(f"{dataset}: ", kinds).left.items():
            keys = MappingReader(f"{dataset}: {kind}: ", entry)
            where = keys.take("measured_in", tuple[str, ...], ())
            found[dataset, kind] = RunNoise(
                keys.take("std", float), keys.take("freedom", int), keys.take("cells", int), where
            )
            keys.close()
    return found


def interval(scores: Sequence[float], noise: RunNoise | None) -> Spread:
    """Mean, standard deviation, and half of the 95 % interval of the mean.

    From ENOUGH runs on, Student's t interval of these runs. Below, the pooled standard deviation, or their own if it is
    larger, with the pooled degrees of freedom. Without pooled noise, that of two or more runs.
    """
    own = Spread.of(scores)
    if len(scores) >= ENOUGH or noise is None:
        return own
    std = max(own.std or 0.0, noise.std)
    return own._replace(half=student(noise.freedom) * std / math.sqrt(len(scores)))


def judged(
    published: Published | None, scores: Sequence[float], noise: RunNoise | None, reduced: bool = False
) -> Reproduced:
    """scores: of independent runs, in percent."""
    if not scores:
        return Reproduced(published, None, None, NOT_RUN)
    ours = interval(scores, noise)
    if reduced or published is None:
        return Reproduced(published, ours, None, REDUCED if reduced else "-")
    difference, band = ours.mean - published.mean, noise.band if noise else None
    return Reproduced(published, ours, difference, verdict(difference, ours.half, band), band)


def verdict(difference: float, half: float | None, band: float | None) -> str:
    """met: the interval difference ± half is within ± band; off: it is outside; undecided: neither, or no interval."""
    if half is None or band is None:
        return UNDECIDED
    if abs(difference) + half <= band:
        return MET
    return OFF if abs(difference) - half > band else UNDECIDED


def independent(scores: Sequence[tuple[float, str]], drawn: bool) -> list[float]:
    """Scores of independent runs. scores: with the partition of each; drawn: whether partitions are random, in which
    case the runs on one partition are averaged, because they share its draw."""
    if not drawn:
        return [score for score, _ in scores]
    by_draw: dict[str, list[float]] = {}
    for score, partition in scores:
        by_draw.setdefault(partition, []).append(score)
    return [math.fsum(own) / len(own) for own in by_draw.values()]
