"""A leaderboard: what every method reaches on every benchmark, and how the methods rank over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.ranking import LEVEL, Ranking, ranking
from coterie.analysis.significance import Spread
from coterie.analysis.tables import TextTable
from coterie.core.metric_scale import MetricScale
from coterie.federation.history import worst_tenth

NOT_RUN, PARTIAL, COMPLETE, REFUSED, FAILED = "not run", "partial", "complete", "refused", "failed"
RANKS_NOTE = (
    "rank: average over the benchmarks on which all ranked methods have a result of every seed; 1 is the best. "
    "Numbers: mean over seeds ± half of the 95 % interval of the mean over clients."
)


class SeedOutcome(NamedTuple):
    """What one training measured."""

    scores: tuple[float, ...]  # of the clients
    calibration: float | None
    megabytes: float
    seconds: float
    shared: bool  # others ran on the machine at the same time

    @property
    def mean(self) -> float:
        return math.fsum(self.scores) / len(self.scores)

    def worst(self, metric: MetricScale) -> float:
        """Mean of the worst tenth of the clients."""
        tenth = metric.from_worst(self.scores)[: worst_tenth(len(self.scores))]
        return math.fsum(tenth) / len(tenth)


class BoardCell(NamedTuple):
    """A method on a benchmark."""

    status: str
    reason: str  # why it was refused or failed
    settings: Mapping[str, Any] | None  # that tuning chose
    measured: str  # the model that is measured
    seeds: Mapping[int, SeedOutcome]
    metric: MetricScale

    @property
    def mean(self) -> Spread | None:
        return Spread.of([one.mean for one in self.seeds.values()]) if self.seeds else None

    @property
    def worst(self) -> float | None:
        return mean_of([one.worst(self.metric) for one in self.seeds.values()])

    @property
    def calibration(self) -> float | None:
        known = [one.calibration for one in self.seeds.values()]
        return None if None in known else mean_of([value for value in known if value is not None])

    @property
    def megabytes(self) -> float | None:
        return mean_of([one.megabytes for one in self.seeds.values()])

    @property
    def seconds(self) -> float | None:
        return mean_of([one.seconds for one in self.seeds.values()])

    @property
    def text(self) -> str:
        """Such as: 81.20 ± 0.31; or why there is no number."""
        if self.mean is None:
            return self.status
        half = "" if self.mean.half is None else f" ± {self.metric.number(self.mean.half)}"
        more = f" ({len(self.seeds)} seeds)" if self.status == PARTIAL else ""
        return f"{self.metric.number(self.mean.mean)}{half}{more}"


class BoardBenchmark(NamedTuple):
    id: str
    text: str  # data, network and settings
    draws: bool  # whether every seed draws its own partition


class Board(NamedTuple):
    """Everything that a page of a leaderboard shows."""

    benchmarks: Sequence[BoardBenchmark]
    methods: Sequence[str]  # titles
    cells: Mapping[tuple[str, str], BoardCell]  # benchmark, method
    trials: int  # of every tuning
    seeds: Sequence[int]
    validation: float
    spaces: Mapping[str, str]  # method -> what its tuning searched, in words
    origins: Mapping[str, Sequence[str]]  # kind of provenance -> values

    @property
    def ranking(self) -> Ranking | None:
        complete = {
            b.id: {
                m: cell.mean.mean
                for m in self.methods
                for cell in [self.cells[b.id, m]]
                if cell.status == COMPLETE and cell.mean
            }
            for b in self.benchmarks
        }
        higher = {b.id: self.cells[b.id, m].metric.higher for b in self.benchmarks for m in self.methods}
        return ranking({name: own for name, own in complete.items() if len(own) > 1}, higher)

    @property
    def order(self) -> list[str]:
        """Methods by rank; those without one last."""
        ranks = self.ranking.ranks if self.ranking else {}
        return [*ranks, *(method for method in self.methods if method not in ranks)]

    @property
    def reasons(self) -> list[tuple[str, str, str]]:
        """Method, benchmark and reason of every cell that was refused or failed."""
        return [
            (m, b.id, f"{self.cells[b.id, m].status}: {self.cells[b.id, m].reason}")
            for m in self.methods
            for b in self.benchmarks
            if self.cells[b.id, m].reason
        ]

    def rows(self) -> list[list[str]]:
        """Method, average rank, and a cell for every benchmark."""
        ranks = self.ranking.ranks if self.ranking else {}
        return [
            [m, f"{ranks[m]:.2f}" if m in ranks else "-", *(self.cells[b.id, m].text for b in self.benchmarks)]
            for m in self.order
        ]

    def table(self) -> TextTable:
        header = ["method", "rank", *(benchmark.id for benchmark in self.benchmarks)]
        note = " ".join([RANKS_NOTE, verdict(self.ranking)])
        return TextTable("Leaderboard", header, self.rows(), note)


def mean_of(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def verdict(found: Ranking | None) -> str:
    """Friedman's and Nemenyi's tests in a sentence."""
    if found is None:
        return "Ranks need two methods with results of every seed on one benchmark."
    if found.test is None:
        return f"{found.missing}."
    test, k, n = found.test, len(found.ranks), len(found.benchmarks)
    differ = "differ" if test.f_p < LEVEL else "do not differ significantly"
    f = "∞" if math.isinf(test.f) else f"{test.f:.2f}"
    return (
        f"Friedman's test of {k} methods on {n} benchmarks: χ² = {test.statistic:.2f}, p = {p_text(test.p)}; with Iman "
        f"and Davenport's correction F = {f}, p = {p_text(test.f_p)}: the methods {differ}. Nemenyi's critical "
        f"difference at 5 %: {test.critical:.2f} ranks."
    )


def p_text(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0005 else f"{p:.0e}"
