"""The record of a run, round by round, and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale
from coterie.core.tree import Tree
from coterie.execution import Scores

POINTS = {
    "pre": "personal model as downloaded, before local training",
    "post": "personal model after local training",
    "finished": "personal model after the final step of the method",
    "kept": "personal model as downloaded after the full last round",
    "global": "the server's model",
    "new_pre": "clients that were not in training, as downloaded",
    "new_post": "the same after local training",
    "new_global": "the server's model on clients that were not in training",
}
PATIENCE = 20  # measured rounds after which a run that learns nothing gets a hint


def worst_tenth(num_clients: int) -> int:
    """Number of clients in the worst 10 %, at least one."""
    return max(1, num_clients // 10)


def clients_text(num_clients: int) -> str:
    return f"{num_clients} client{'' if num_clients == 1 else 's'}"


def worst_tenth_text(counts: Iterable[int]) -> str:
    """The size of the worst 10 %, such as "2 clients". counts: of clients, one for each run; they may differ."""
    sizes = sorted(set(map(worst_tenth, counts)))
    return clients_text(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {clients_text(sizes[-1])}"


class Summary(NamedTuple):
    """A metric of many clients as a few numbers. Shares are in 0..1."""

    mean: float  # every client counts the same
    by_samples: float  # every sample counts the same
    std: float  # over clients
    worst10: float  # mean of the worst tenth of the clients, at least one
    loss: float

    @staticmethod
    def of(scores: Scores, metric: MetricScale = ACCURACY_SCALE) -> Summary:
        tested = scores.defined
        value, total = scores.value[tested].double(), scores.total[tested]
        if not len(value):
            return Summary(*[float("nan")] * 5)
        worst = value.sort(descending=not metric.higher).values[: worst_tenth(len(value))]
        return Summary(
            float(value.mean()),
            float(scores.weighted[tested].sum() / total.sum()),
            float(value.std(correction=0)),
            float(worst.mean()),
            float((scores.loss[tested] * total).sum() / total.sum()),
        )


@dataclass(frozen=True, repr=False)
class Round:
    """The record of one round."""

    number: int  # rounds completed; the server's state is the one after that many
    participants: Tensor  # (S,)
    left_out: tuple[int, ...] = ()  # participants without a usable answer
    scores: dict[tuple[str, str], Scores] = field(default_factory=dict)  # (point, split) -> scores
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> time
    report: Tree = field(default_factory=dict)
    metric: MetricScale = ACCURACY_SCALE  # what the scores are of

    def summary(self, point: str, split: str = "test") -> Summary:
        return Summary.of(self.scores[point, split], self.metric)

    def score(self, point: str, split: str = "test") -> float | None:
        """The mean over clients of the metric, such as accuracy; None where it was not measured."""
        return self.summary(point, split).mean if (point, split) in self.scores else None

    def __repr__(self) -> str:
        found = [f"{point} {self.metric.text(self.summary(point, s).mean)}" for point, s in self.scores if s == "test"]
        scores = f", mean {self.metric.words}: {', '.join(found)}" if found else ""
        return f"Round {self.number}: {len(self.participants)} clients, {len(self.left_out)} left out{scores}"


@dataclass(frozen=True)
class Outcome:
    """One result of a run: of the last round, the best on test, and the one that validation selects."""

    name: str
    point: str
    last: Summary
    best_on_test: float  # the best over rounds: an upper bound, chosen with the test set
    by_validation: float | None  # the test score of the round that was best on the validation set


class Ended(NamedTuple):
    """Why a run ended, and after which round."""

    reason: str  # rounds, until, patience, max_time or interrupted
    round: int
    explanation: str = ""
    best_round: int | None = None  # for patience: the round with the best validation score


class History(list[Round]):
    """All rounds of a run."""

    ended: Ended | None = None  # None: the run continues or was interrupted

    def __repr__(self) -> str:
        shown = [repr(record) for record in self]
        for at in range(1, len(self)):
            if self[at].number <= self[at - 1].number:
                shown[at] = shown[at].replace("Round", "After round", 1)  # the method's final step, or new clients
        shown[3:-3] = ["..."] if len(shown) > 7 else shown[3:-3]
        count = len({record.number for record in self})
        return "\n".join([f"History of {count} round{'' if count == 1 else 's'}", *(f"  {s}" for s in shown)])

    def with_point(self, point: str, split: str = "test") -> Iterator[Round]:
        return (record for record in self if (point, split) in record.scores)

    def curve(self, point: str, split: str = "test") -> list[tuple[int, float]]:
        """(round, mean score), ready to plot."""
        return [(record.number, record.summary(point, split).mean) for record in self.with_point(point, split)]

    def outcome(self, name: str, point: str) -> Outcome | None:
        test = dict(self.curve(point))
        if not test:
            return None
        validation = {number: score for number, score in self.curve(point, "validation") if not math.isnan(score)}
        last = list(self.with_point(point))[-1]
        chosen = last.metric.best(validation, lambda number: validation[number]) if validation else None
        by_validation = None if chosen is None else test[chosen]
        return Outcome(name, point, last.summary(point), last.metric.best(test.values(), float), by_validation)

    def tested(self, point: str) -> int:
        """Number of clients with test samples in the last measurement at this point."""
        found = list(self.with_point(point))
        return int((found[-1].scores[point, "test"].total > 0).sum()) if found else 0

    def stuck(self, guess: float) -> bool:
        """Whether exactly the last PATIENCE measured rounds are no better than `guess`; true once per run."""
        if not self[-1].scores:
            return False
        late: list[bool] = []
        for record in reversed(self):
            if record.scores:
                found = [record.summary(*at).by_samples for at in record.scores if at[1] == "test"]
                late.append(not any(record.metric.better(score, guess) for score in found))
            if len(late) > PATIENCE or (late and not late[-1]):
                break
        return late.count(True) == PATIENCE

    def stacked(self, name: str) -> Tensor:
        """What the server reported under this name, (rounds, ...); rounds with another shape are left out."""
        found = [record.report[name] for record in self if name in record.report]
        return torch.stack([t for t in found if t.shape == found[-1].shape]) if found else torch.zeros(0)
