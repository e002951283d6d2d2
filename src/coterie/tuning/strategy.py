"""Search strategies: which candidate trains for how many rounds, within the budget. Independent of training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from coterie.api.variations import Candidate
from coterie.core.errors import CoterieError
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale


class Stage(NamedTuple):
    """A number of candidates, trained up to a number of rounds."""

    candidates: int
    rounds: int


class Job(NamedTuple):
    candidate: int
    seed: int
    rounds: int  # including those of earlier stages


class Trial(NamedTuple):
    """The outcome of a job."""

    job: Job
    score: float | None  # mean over clients on the validation samples; None: training diverged
    reached: int  # completed rounds, including those of earlier stages
    seconds: float  # since the stage before
    failed: str | None = None  # why


class SearchBudget(NamedTuple):
    """Limits on all trials together, across interruptions."""

    rounds: int | None = None
    seconds: float | None = None


class BudgetSpent(Exception):
    """The budget allows no further training."""


def halving(candidates: int, rounds: int, eta: int) -> list[Stage]:
    """Successive halving: the best 1/eta of a stage train eta times longer; the last stage trains all rounds."""
    if eta < 2:
        raise CoterieError(f"eta must be at least 2, got {eta}")
    steps = 0
    while eta ** (steps + 1) <= min(candidates, rounds):
        steps += 1
    return [Stage(candidates // eta**k, rounds // eta ** (steps - k)) for k in range(steps + 1)]


class SearchStrategy(ABC):
    """The trials of a search. Decisions depend on trials only, so a resumed search makes the same ones."""

    def __init__(
        self,
        candidates: list[Candidate],
        stages: Sequence[Stage],
        seeds: Sequence[int],
        budget: SearchBudget,
        metric: MetricScale = ACCURACY_SCALE,
    ) -> None:
        self.metric = metric  # what scores are of
        self.candidates, self.stages, self.seeds, self.budget = candidates, stages, seeds, budget
        self.trials: dict[Job, Trial] = {}
        self.recorded: dict[int, Candidate] = {}  # candidates of an earlier call
        self.untried: list[Job] = []  # jobs of the stage in which the budget ended
        self.later: list[str] = []  # description of what would have followed

    def know(self, trials: Iterable[Trial], candidates: Mapping[int, Candidate] = MappingProxyType({})) -> None:
        """Add the trials of an interrupted search, and their candidates."""
        self.trials |= {trial.job: trial for trial in trials}
        self.recorded |= candidates

    @abstractmethod
    def run(self, train: Callable[[Job], Trial], dropped: Callable[[int], None] = lambda candidate: None) -> None:
        """Run all jobs. train: runs one, or raises BudgetSpent. dropped: called when a candidate will not continue."""

    def train(self, candidate: int, rounds: int, train: Callable[[Job], Trial]) -> None:
        """Train all seeds of a candidate, unless it has failed. Raises BudgetSpent."""
        for seed in self.seeds:
            job = Job(candidate, seed, rounds)
            if job in self.trials or self.failed(candidate):
                continue
            if self.late(0.0) or not self.affords(job):
                raise BudgetSpent
            self.trials[job] = train(job)

    def left(self, candidates: Iterable[int], rounds: int) -> list[Job]:
        """Jobs of these candidates that are not done."""
        jobs = (Job(candidate, seed, rounds) for candidate in candidates for seed in self.seeds)
        return [job for job in jobs if job not in self.trials and not self.failed(job.candidate)]

    def affords(self, job: Job) -> bool:
        reached = self.reached()
        cost = job.rounds - reached.get((job.candidate, job.seed), 0)
        return self.budget.rounds is None or sum(reached.values()) + cost <= self.budget.rounds

    def late(self, seconds: float) -> bool:
        """Whether the time budget is spent, given the seconds of the current trial."""
        spent = sum(trial.seconds for trial in self.trials.values()) + seconds
        return self.budget.seconds is not None and spent >= self.budget.seconds

    def reached(self) -> dict[tuple[int, int], int]:
        """(candidate, seed) -> rounds."""
        found: dict[tuple[int, int], int] = {}
        for job, trial in self.trials.items():
            at = (job.candidate, job.seed)
            found[at] = max(found.get(at, 0), trial.reached)
        return found

    def failed(self, candidate: int) -> str | None:
        found = (t.failed for t in self.trials.values() if t.job.candidate == candidate and t.failed)
        return next(found, None)

    def scores(self, candidate: int, rounds: int) -> dict[int, float]:
        """Seed -> score; empty unless all seeds have one."""
        found = [self.trials.get(Job(candidate, seed, rounds)) for seed in self.seeds]
        scores = {t.job.seed: t.score for t in found if t is not None and t.score is not None}
        return scores if len(scores) == len(self.seeds) else {}

    def merit(self, candidate: int, rounds: int) -> float:
        """The mean score over seeds, negative where smaller scores are better."""
        scores = self.scores(candidate, rounds)
        return (1 if self.metric.higher else -1) * sum(scores.values()) / len(scores)


class Stages(SearchStrategy):
    """A fixed list of candidates, in one stage (grid, random) or several (halving)."""

    def run(self, train: Callable[[Job], Trial], dropped: Callable[[int], None] = lambda candidate: None) -> None:
        active = list(range(self.stages[0].candidates))
        for k, stage in enumerate(self.stages):
            try:
                for candidate in active:
                    self.train(candidate, stage.rounds, train)
            except BudgetSpent:
                self.untried = self.left(active, stage.rounds)
                self.later = [f"then the best {s.candidates} with {s.rounds} rounds" for s in self.stages[k + 1 :]]
                return
            ranked = sorted((c for c in active if not self.failed(c)), key=lambda c: -self.merit(c, stage.rounds))
            promoted = ranked[: self.stages[k + 1].candidates] if k + 1 < len(self.stages) else []
            for candidate in active:
                if candidate not in promoted:
                    dropped(candidate)
            active = promoted
