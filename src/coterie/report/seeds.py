"""Runs that differ only in their seed, taken together: what they measured, as means with 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coterie.analysis.looks import Look, looks
from coterie.analysis.significance import Spread
from coterie.core.metric_scale import MetricScale
from coterie.report.charts import Series
from coterie.report.naming import Reported, dataset, entries, named
from coterie.runs.stored_run import StoredRun

OverSeeds = list[tuple[float, list[float]]]  # x, and one y for each seed


class SeedGroup(NamedTuple):
    """One number that a method reports, in all runs with different seeds."""

    label: str
    look: Look  # the same in all charts
    entries: tuple[Reported, ...]  # at least one

    @property
    def run(self) -> StoredRun:
        """The first of its runs, for what all seeds share."""
        return self.entries[0].run

    @property
    def point(self) -> str:
        return self.entries[0].point

    @property
    def runs(self) -> list[StoredRun]:
        return [entry.run for entry in self.entries]

    @property
    def same_clients(self) -> bool:
        """Whether all seeds have the same clients, and not a partition of their own."""
        return len({dataset(run) for run in self.runs}) == 1

    def curve(self, measure: str = "mean", point: str | None = None) -> OverSeeds:
        """(round, score of each seed) in the rounds that all seeds measured. point: default: the reported one."""
        return common([run.curve(point or self.point, measure=measure) for run in self.runs])

    def client_scores(self) -> dict[tuple[tuple[str, str], int], list[float]]:
        """(data, client) -> its score in each seed that has it, as shown."""
        found: dict[tuple[tuple[str, str], int], list[float]] = {}
        for run in self.runs:
            for score in run.last_scores.get(self.point, ()):
                found.setdefault((dataset(run), score.client), []).append(run.metric.factor * score.value)
        return found

    def ranked(self) -> OverSeeds:
        """(percent of clients, score of each seed) from the worst client to the best; empty if their numbers differ."""
        metric = self.run.metric
        scores = [metric.from_worst(s.value for s in run.last_scores.get(self.point, ())) for run in self.runs]
        number = len(scores[0])
        if not number or any(len(own) != number for own in scores):
            return []
        places = enumerate(zip(*scores, strict=True), 1)
        return [(100 * place / number, [metric.factor * v for v in values]) for place, values in places]


def grouped(runs: Sequence[StoredRun]) -> list[SeedGroup]:
    """What the runs report, with the seeds of a method together, in the order of the runs."""
    found: dict[str, list[Reported]] = {}
    for entry in entries(runs):
        found.setdefault(entry.label, []).append(entry)
    styles = looks(list(found))
    return [SeedGroup(label, styles[label], tuple(group)) for label, group in found.items()]


def trained(groups: Sequence[SeedGroup]) -> list[SeedGroup]:
    """Each training once: a run that reports several numbers is in the group of the first."""
    seen: set[int] = set()
    kept = []
    for group in groups:
        if id(group.run) not in seen:
            kept.append(group)
        seen |= {id(run) for run in group.runs}
    return kept


def common(curves: Sequence[Sequence[tuple[float, float]]]) -> OverSeeds:
    """Curves at the places that all of them have."""
    own = [dict(curve) for curve in curves]
    places = sorted(set.intersection(*(set(curve) for curve in own)))
    return [(place, [curve[place] for curve in own]) for place in places]


def series(name: str, points: OverSeeds, look: Look) -> Series:
    """A line at the means over seeds, with their 95 % interval as a band."""
    spreads = [(x, Spread.of(values)) for x, values in points]
    return Series(name, [(x, s.mean) for x, s in spreads], look, [s.half for _, s in spreads])


def with_interval(values: Sequence[float], written: Callable[[float], str]) -> str:
    """Mean ± half of the 95 % interval, which several seeds have."""
    if not values:
        return ""
    spread = Spread.of(values)
    return written(spread.mean) + ("" if spread.half is None else f" ± {written(spread.half)}")


def score_cell(values: Sequence[float | None], metric: MetricScale) -> str:
    """Values of a metric, one for each seed, as a cell: mean ± half of the 95 % interval."""
    known = [metric.factor * v for v in values if v is not None and v == v]
    return with_interval(known, metric.written)


def labeled_runs(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Name -> runs that differ only in their seed; a run that measured nothing is alone."""
    labels = {id(run): group.label for group in reversed(grouped(runs)) for run in group.runs}
    names = {id(run): name for run, name in named(runs)}
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        found.setdefault(labels.get(id(run), names[id(run)]), []).append(run)
    return found
