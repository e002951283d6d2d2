"""What a tracker is, and what it is shown of a run under which names."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from coterie.core.errors import CoterieError
from coterie.federation import History, Round, Summary
from coterie.federation.disk import whole

log = logging.getLogger("coterie")
MARKS = "tracking.json"  # in the run folder: by which mark a tracker knows the run
NAMES = {"mean": "accuracy", "loss": "loss"}  # of Summary's fields; others are accuracy_std, ...
Values = Mapping[str, float]


class Tracker(ABC):
    """One tool, for one run. Its package is imported when it is made."""

    title: ClassVar[str]

    def __init__(self) -> None:
        self.latest: dict[str, int] = {}  # name -> step of its last value

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any], mark: str | None, rounds: int) -> str:
        """Begin, or go on after so many rounds with what has this mark. The mark."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None: ...

    @abstractmethod
    def close(self, step: int, outcome: Values | None) -> None:
        """outcome: what the run came to; None if it did not end."""

    def logged(self, history: History) -> dict[str, int]:
        """Name -> step of its last value, where a run goes on: by what happened before."""
        return {name: record.number for record in history for name in values_of(record)}

    def add(self, record: Round) -> None:
        """Every name once a step: what follows the last round adds names to it."""
        values = {n: v for n, v in values_of(record).items() if record.number > self.latest.get(n, 0)}
        if values:
            self.log(record.number, values)
            self.latest |= dict.fromkeys(values, record.number)


class Tracking:
    """All trackers of a run. One that fails is left out from then on, and the run goes on."""

    def __init__(self, trackers: Sequence[Tracker], folder: Path, config: Mapping[str, Any]) -> None:
        self.trackers, self.folder = list(trackers), folder
        self.config = {name: part for name, part in config.items() if name != "command"}
        self.step = 0

    def begin(self, history: History) -> None:
        """Before the first round, or before the one after these. What goes wrong here is an error."""
        if not self.trackers:
            return
        marks = read_marks(self.folder / MARKS)
        for tracker in self.trackers:
            known = marks.get(tracker.title)
            try:
                marks[tracker.title] = tracker.open(self.folder, self.config, known, len(history))
                tracker.latest = tracker.logged(history) if known else {}
            except Exception as error:
                anew = f"; to begin anew there, remove {self.folder / MARKS}" if known else ""
                raise CoterieError(f"{tracker.title} cannot begin: {in_words(error)}{anew}") from None
        write_marks(self.folder / MARKS, marks)
        for record in history:
            self.add(record)

    def add(self, record: Round) -> None:
        self.step = max(self.step, record.number)
        self._each(lambda tracker: tracker.add(record))

    def end(self, told: Mapping[str, Any]) -> None:
        """told: the content of result.json."""
        outcome = dict(outcome_values(told))
        self._each(lambda tracker: tracker.close(self.step, outcome))
        self.trackers = []

    def close(self) -> None:
        """The run did not come to its end; nothing happens if it did."""
        self._each(lambda tracker: tracker.close(self.step, None))
        self.trackers = []

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever it is, training is worth more
                log.warning("%s failed, and sees no more of this run: %s", tracker.title, in_words(error))
                self.trackers.remove(tracker)
                with contextlib.suppress(Exception):
                    tracker.close(self.step, None)


def values_of(record: Round) -> dict[str, float]:
    """A round in numbers, by names such as post/accuracy_worst10."""
    found: dict[str, float] = {
        "bytes/up": record.bytes_up,
        "bytes/down": record.bytes_down,
        "clients/participants": len(record.participants),
        "clients/left_out": len(record.left_out),
        **{f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()},
    }
    for (point, split), scores in record.scores.items():
        where = point if split == "test" else f"{split}_{point}"
        for name, value in Summary.of(scores)._asdict().items():
            if not math.isnan(value):  # nobody has samples
                found[f"{where}/{NAMES.get(name, f'accuracy_{name}')}"] = value
    return found


def outcome_values(told: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What the run came to, by names such as outcome/FedPAC/accuracy."""
    for outcome in told["outcomes"]:
        last = {NAMES.get(name, f"accuracy_{name}"): value for name, value in outcome["last"].items()}
        best = {name: outcome[name] for name in ("best_on_test", "best_by_validation")}
        for name, value in (last | best).items():
            if value is not None:
                yield f"outcome/{outcome['name']}/{name}", value
    for name in ("rounds", "bytes_up", "bytes_down"):
        yield f"outcome/{name}", told[name]
    for phase, seconds in told["seconds"].items():
        yield f"outcome/seconds_{phase}", seconds
    yield "outcome/left_out", len(told["left_out"])


def read_marks(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def write_marks(path: Path, marks: Mapping[str, str]) -> None:
    try:
        with whole(path) as part:
            part.write_text(json.dumps(marks, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CoterieError(f"{path} cannot be written: {error.strerror}") from None


def in_words(error: Exception) -> str:
    said = str(getattr(error, "strerror", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__
