"""Who is trained for how long, and when it is enough. It knows nothing of what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from coterie.core.errors import CoterieError


class Rung(NamedTuple):
    """A step of the search: so many candidates are trained up to so many rounds."""

    candidates: int
    rounds: int


class Job(NamedTuple):
    candidate: int
    seed: int
    rounds: int  # from the first one; those of the rung before are among them


class Trial(NamedTuple):
    """What became of a job."""

    job: Job
    accuracy: float | None  # mean over clients on the validation samples, in 0..1; None: training diverged
    reached: int  # rounds that were trained, from the first one
    seconds: float  # since the rung before
    failed: str | None = None  # why


class Budget(NamedTuple):
    """Of all trials together, however often the search was stopped."""

    rounds: int | None = None
    seconds: float | None = None


class Spent(Exception):
    """The budget does not allow more."""


def halving(candidates: int, rounds: int, eta: int) -> list[Rung]:
    """Successive halving: of each rung the best 1/eta go on to eta times the rounds; the last rung has all rounds."""
    if eta < 2:
        raise CoterieError(f"eta must be at least 2, not {eta}")
    steps = 0
    while eta ** (steps + 1) <= min(candidates, rounds):
        steps += 1
    return [Rung(candidates // eta**k, rounds // eta ** (steps - k)) for k in range(steps + 1)]


class Ladder:
    """The rungs, climbed. Every decision comes from the trials alone, so it is the same when some are known before."""

    def __init__(self, rungs: Sequence[Rung], seeds: Sequence[int], budget: Budget) -> None:
        self.rungs, self.seeds, self.budget = rungs, seeds, budget
        self.trials: dict[Job, Trial] = {}
        self.untried: list[Job] = []  # of the rung in which the budget ended
        self.unclimbed = 0  # rungs after that one

    def know(self, trials: Iterable[Trial]) -> None:
        """These were done before."""
        self.trials |= {trial.job: trial for trial in trials}

    def climb(self, train: Callable[[Job], Trial], dropped: Callable[[int], None] = lambda candidate: None) -> None:
        """train: does one job, or raises Spent. dropped: a candidate will not go on."""
        climbing = list(range(self.rungs[0].candidates))
        for k, rung in enumerate(self.rungs):
            try:
                for candidate in climbing:
                    self._train(candidate, rung.rounds, train)
            except Spent:
                jobs = (Job(candidate, seed, rung.rounds) for candidate in climbing for seed in self.seeds)
                self.untried = [job for job in jobs if job not in self.trials and not self.failed(job.candidate)]
                self.unclimbed = len(self.rungs) - k - 1
                return
            ranked = sorted((c for c in climbing if not self.failed(c)), key=lambda c: -self.mean(c, rung.rounds))
            going_on = ranked[: self.rungs[k + 1].candidates] if k + 1 < len(self.rungs) else []
            for candidate in climbing:
                if candidate not in going_on:
                    dropped(candidate)
            climbing = going_on

    def _train(self, candidate: int, rounds: int, train: Callable[[Job], Trial]) -> None:
        for seed in self.seeds:
            job = Job(candidate, seed, rounds)
            if job in self.trials or self.failed(candidate):
                continue
            if self.late(0.0) or not self.affords(job):
                raise Spent
            self.trials[job] = train(job)

    def affords(self, job: Job) -> bool:
        reached = self.reached()
        cost = job.rounds - reached.get((job.candidate, job.seed), 0)
        return self.budget.rounds is None or sum(reached.values()) + cost <= self.budget.rounds

    def late(self, seconds: float) -> bool:
        """Whether the time is over, so many seconds into a trial."""
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
        """Seed -> accuracy; of all seeds, or of none."""
        found = [self.trials.get(Job(candidate, seed, rounds)) for seed in self.seeds]
        scores = {t.job.seed: t.accuracy for t in found if t is not None and t.accuracy is not None}
        return scores if len(scores) == len(self.seeds) else {}

    def mean(self, candidate: int, rounds: int) -> float:
        scores = self.scores(candidate, rounds)
        return sum(scores.values()) / len(scores)
