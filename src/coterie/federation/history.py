"""What happened, round by round, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.clients import Scores
from coterie.core.tree import Tree

POINTS = {
    "pre": "personal model as downloaded, before local training",
    "post": "personal model after local training",
    "finished": "personal model after the final step of the method",
    "kept": "personal model that is kept where all clients train once more: after that training, as downloaded",
    "global": "the server's model",
    "new_pre": "clients that were not in training, with what the server gives them",
    "new_post": "the same after local training",
    "new_global": "the server's model on clients that were not in training",
}


PATIENCE = 20  # measured rounds after which a run that learns nothing gets a hint


class Summary(NamedTuple):
    """Accuracies of many clients in a few numbers, all in 0..1."""

    mean: float  # every client counts the same
    by_samples: float  # every sample counts the same
    std: float  # over clients
    worst10: float  # mean of the worst tenth of the clients, at least one
    loss: float

    @staticmethod
    def of(scores: Scores) -> Summary:
        tested = scores.total > 0  # a client without samples has no accuracy
        accuracy, total = scores.accuracy[tested].double(), scores.total[tested]
        if not len(accuracy):
            return Summary(*[float("nan")] * 5)
        worst = accuracy.sort().values[: max(1, len(accuracy) // 10)]
        return Summary(
            float(accuracy.mean()),
            float(scores.correct[tested].sum() / total.sum()),
            float(accuracy.std(correction=0)),
            float(worst.mean()),
            float((scores.loss[tested] * total).sum() / total.sum()),
        )


@dataclass(frozen=True)
class Round:
    number: int  # rounds completed; the server's state is the one after that many
    participants: Tensor  # (S,)
    left_out: tuple[int, ...] = ()  # participants whose answer was not finite, or did not come
    scores: dict[tuple[str, str], Scores] = field(default_factory=dict)  # (point, split) -> scores
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # phase -> time
    report: Tree = field(default_factory=dict)

    def accuracy(self, point: str, split: str = "test") -> float | None:
        scores = self.scores.get((point, split))
        return None if scores is None else Summary.of(scores).mean


@dataclass(frozen=True)
class Outcome:
    """One number that a run reports, under three honest names."""

    name: str
    point: str
    last: Summary
    best_on_test: float  # the maximum over rounds: an upper bound, chosen with the test set
    by_validation: float | None  # the test accuracy of the round that was best on the validation set


class History(list[Round]):
    def with_point(self, point: str, split: str = "test") -> Iterator[Round]:
        return (record for record in self if (point, split) in record.scores)

    def curve(self, point: str, split: str = "test") -> list[tuple[int, float]]:
        """(round, mean accuracy), ready to plot."""
        found = self.with_point(point, split)
        return [(record.number, Summary.of(record.scores[point, split]).mean) for record in found]

    def outcome(self, name: str, point: str) -> Outcome | None:
        test = dict(self.curve(point))
        if not test:
            return None
        validation = dict(self.curve(point, "validation"))
        last = list(self.with_point(point))[-1].scores[point, "test"]
        chosen = max(validation, key=lambda number: validation[number]) if validation else None
        by_validation = None if chosen is None else test[chosen]
        return Outcome(name, point, Summary.of(last), max(test.values()), by_validation)

    def stuck(self, guess: float) -> bool:
        """Whether now, and not before, the last PATIENCE measured rounds are no better than a guess."""
        if not self[-1].scores:
            return False
        late: list[bool] = []
        for record in reversed(self):
            if record.scores:
                found = [Summary.of(s).by_samples for (_, split), s in record.scores.items() if split == "test"]
                late.append(all(accuracy <= guess for accuracy in found))
            if len(late) > PATIENCE or (late and not late[-1]):
                break
        return late.count(True) == PATIENCE

    def stacked(self, name: str) -> Tensor:
        """What the server reported under this name, (rounds, ...); rounds of another shape are not in it."""
        found = [record.report[name] for record in self if name in record.report]
        return torch.stack([t for t in found if t.shape == found[-1].shape]) if found else torch.zeros(0)
