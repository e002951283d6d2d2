"""The outcome of a search: ranked candidates, candidates that were not tried, and the final test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.analysis.comparison import INTERVAL, spread_text
from coterie.analysis.significance import Spread
from coterie.analysis.tables import TextTable
from coterie.api.variations import Candidate, shown
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale
from coterie.federation.history import POINTS
from coterie.tuning.strategy import SearchStrategy

UNBIASED = "measured once, after the choice, so the choice does not bias it"


@dataclass(frozen=True)
class Standing:
    number: int  # of the candidate
    settings: Candidate
    scores: dict[int, float]  # seed -> score on the validation samples; empty if training diverged
    rounds: int
    seconds: float  # of all its trials
    failed: str | None  # why

    @property
    def spread(self) -> Spread | None:
        return Spread.of(list(self.scores.values())) if self.scores else None

    def as_dict(self) -> dict[str, Any]:
        mean, std = self.spread[:2] if self.spread else (None, None)
        return {
            "settings": self.settings,
            "mean": mean,
            "std": std,
            "scores": {str(seed): score for seed, score in self.scores.items()},
            "rounds": self.rounds,
            "seconds": round(self.seconds, 2),
            "failed": self.failed,
        }


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search. `best` holds settings for coterie.run."""

    title: str  # of the method
    data: str
    clients: int
    point: str
    share: float | None  # of training samples set aside for validation; None: the data has validation samples
    seeds: Sequence[int]
    standings: Sequence[Standing]  # best first, those that failed last
    untried: Sequence[str]  # because the budget was spent
    folder: Path
    test: dict[str, Any] | None  # mean, std, ... over clients, of the final run with the best settings
    metric: MetricScale = ACCURACY_SCALE

    @property
    def best(self) -> Candidate:
        return self.standings[0].settings

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.title,
            "data": self.data,
            "clients": self.clients,
            "metric": self.metric.name,
            "measured": POINTS[self.point],
            "validation": self.share,
            "seeds": list(self.seeds),
            "standings": [{"rank": rank, **s.as_dict()} for rank, s in enumerate(self.standings, 1)],
            "not_tried": list(self.untried),
            "best": self.best,
            "test": self.test,
            "folder": str(self.folder),
        }

    def table(self) -> TextTable:
        share = "validation samples of their own" if self.share is None else f"{100 * self.share:g} % of the training"
        several = len(self.seeds) > 1
        over = f"; {INTERVAL} over {len(self.seeds)} seeds, SD: their standard deviation" if several else ""
        note = (
            f"validation: {self.metric.heading}, mean over clients on {share} samples, after the last round, "
            f"{POINTS[self.point]}{over}. No test sample was used."
        )
        rows = [
            [
                str(rank),
                shown(s.settings),
                cell(s, self.metric),
                *([deviation(s, self.metric)] if several else []),
                str(s.rounds),
                f"{s.seconds:.1f}",
            ]
            for rank, s in enumerate(self.standings, 1)
        ]
        return TextTable(
            f"{self.title} on {self.clients} clients of {self.data}",
            ["rank", "settings", "validation", *(["SD"] if several else []), "rounds", "seconds"],
            rows,
            note,
        )

    def last_words(self) -> list[str]:
        """Notes below the table: failed settings, settings that were not tried, and the test."""
        lines = [f"{shown(s.settings)} failed: {s.failed}" for s in self.standings if s.failed]
        if self.untried:
            lines.append(f"The budget ended the search. Not tried: {'; '.join(self.untried)}")
        if self.test is not None:
            lines.append(
                f"Test {self.metric.words} of the best setting, trained on all training samples with seed "
                f"{self.seeds[0]}: {self.metric.number(self.test['mean'])} ({UNBIASED})"
            )
        return lines


def cell(standing: Standing, metric: MetricScale) -> str:
    return spread_text(list(standing.scores.values()), metric) if standing.scores else "failed"


def deviation(standing: Standing, metric: MetricScale) -> str:
    """The standard deviation over seeds."""
    spread = standing.spread
    return "-" if spread is None or spread.std is None else metric.written(metric.factor * spread.std)


def ranked(strategy: SearchStrategy) -> list[Standing]:
    """Candidates by rounds trained, then by score; only those measured with all seeds, or failed."""
    found = [standing(strategy, number, settings) for number, settings in enumerate(strategy.candidates)]
    sign = -1 if strategy.metric.higher else 1

    def order(standing: Standing) -> tuple[bool, int, float]:
        mean = standing.spread.mean if standing.spread else 0.0
        return standing.failed is not None, -standing.rounds, sign * mean

    return sorted((s for s in found if s is not None), key=order)


def standing(strategy: SearchStrategy, number: int, settings: Candidate) -> Standing | None:
    own = [trial for trial in strategy.trials.values() if trial.job.candidate == number]
    seconds, failed = sum(trial.seconds for trial in own), strategy.failed(number)
    if failed:
        return Standing(number, settings, {}, max(trial.reached for trial in own), seconds, failed)
    for stage in reversed(strategy.stages):
        if scores := strategy.scores(number, stage.rounds):
            return Standing(number, settings, scores, stage.rounds, seconds, None)
    return None


def untried(strategy: SearchStrategy) -> list[str]:
    many = len(strategy.seeds) > 1
    jobs = [
        f"{shown(strategy.candidates[job.candidate])}{f', seed {job.seed}' if many else ''} ({job.rounds} rounds)"
        for job in strategy.untried
    ]
    return jobs + strategy.later
