"""The interface of trackers, and the names of the values that they record."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from coterie.core.errors import CoterieError
from coterie.execution import Scores
from coterie.federation import History, Round
from coterie.runs.disk import read_inside, whole, writing

log = logging.getLogger("coterie")
MARKS = "tracking.json"  # in the run folder: the run's id in each tracker
MOST_GROUPS = 20  # of clients, with values of their own
KEPT = (  # files of the run folder that trackers keep as artifacts: no models, which may reveal a client's data
    "config.json", "result.json", "metrics.csv", "clients.csv", "evaluation.csv", "confusion.csv", "partition.npz",
    "partition.svg",
)  # fmt: skip
Values = Mapping[str, float]


class Tracker(ABC):
    """One tracker for one run. The constructor imports its package."""

    title: ClassVar[str]

    def __init__(self) -> None:
        self.latest: dict[str, int] = {}  # name -> step of its last value
        self.groups: Sequence[str] = ()  # of each client; empty: none are logged

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any], mark: str | None, rounds: int) -> str:
        """Start a run, or resume the one with id `mark` after this many rounds; returns its id."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None: ...

    @abstractmethod
    def keep(self, files: Sequence[Path]) -> None:
        """Store files of a finished run as artifacts, where the tracker has such."""

    @abstractmethod
    def close(self, step: int, outcome: Values | None) -> None:
        """outcome: final values; None if the run did not finish."""

    def logged(self, history: History) -> dict[str, int]:
        """Name -> step of its last value, for a resumed run."""
        return {name: record.number for record in history for name in values_of(record, self.groups)}

    def add(self, record: Round) -> None:
        """Log a round. A name is logged once per step: the final step adds names to the last round."""
        found = values_of(record, self.groups)
        values = {n: v for n, v in found.items() if record.number > self.latest.get(n, 0)}
        if values:
            self.log(record.number, values)
            self.latest |= dict.fromkeys(values, record.number)


class Tracking:
    """All trackers of a run. One that fails is dropped, and the run continues."""

    def __init__(
        self, trackers: Sequence[Tracker], folder: Path, config: Mapping[str, Any], groups: Sequence[int] = ()
    ) -> None:
        """groups: of each client; clients of a group have the same distribution."""
        self.trackers, self.folder = list(trackers), folder
        data = config.get("data", {})
        names = data.get("client_names") or [str(i) for i in range(len(groups))]
        if len(groups) == data.get("clients"):  # fewer clients train if some join later
            for tracker in self.trackers:
                tracker.groups = group_names(groups, names)
        self.config = {name: part for name, part in config.items() if name != "command"}
        self.step = 0

    def begin(self, history: History) -> None:
        """Open all trackers. history: rounds of a run that is resumed. Failures here are errors."""
        if not self.trackers:
            return
        marks = read_marks(self.folder / MARKS)
        for tracker in self.trackers:
            known = marks.get(tracker.title)
            try:
                marks[tracker.title] = tracker.open(self.folder, self.config, known, len(history))
                tracker.latest = tracker.logged(history) if known else {}
            except Exception as error:
                hint = f"; to start a new run there, remove {self.folder / MARKS}" if known else ""
                raise CoterieError(f"{tracker.title} cannot start: {in_words(error)}{hint}") from None
        write_marks(self.folder / MARKS, marks)
        for record in history:
            self.add(record)

    def add(self, record: Round) -> None:
        self.step = max(self.step, record.number)
        self._each(lambda tracker: tracker.add(record))

    def end(self, result: Mapping[str, Any]) -> None:
        """Record the outcome. result: the content of result.json."""
        outcome = dict(outcome_values(result))
        files = [path for path in (self.folder / name for name in KEPT) if path.is_file()]
        self._each(lambda tracker: tracker.keep(files))
        self._each(lambda tracker: tracker.close(self.step, outcome))
        self.trackers = []

    def close(self) -> None:
        """Close the trackers of a run that did not finish."""
        self._each(lambda tracker: tracker.close(self.step, None))
        self.trackers = []

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            try:
                act(tracker)
            except Exception as error:  # training continues, whatever it is
                log.warning("%s failed and is dropped for the rest of this run: %s", tracker.title, in_words(error))
                self.trackers.remove(tracker)
                with contextlib.suppress(Exception):
                    tracker.close(self.step, None)


def group_names(groups: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    """The name of each client's group in trackers; empty if there is one group only, or too many.

    Groups of one client, as in data with natural clients, have the client's name.
    """
    kinds = set(groups)
    if not 1 < len(kinds) <= MOST_GROUPS:
        return ()
    alone = [re.sub(r"[^\w.-]", "_", name) for name in names]
    own = len(kinds) == len(groups) == len(set(alone))
    return tuple(alone) if own else tuple(f"group{group}" for group in groups)


def by_group(scores: Scores, groups: Sequence[str]) -> dict[str, float]:
    """Mean over the clients of each group."""
    found: dict[str, list[float]] = {}
    for client, value, defined in zip(
        scores.clients.tolist(), scores.value.tolist(), scores.defined.tolist(), strict=True
    ):
        if defined:
            found.setdefault(groups[client], []).append(value)
    return {group: fmean(values) for group, values in found.items()}


def values_of(record: Round, groups: Sequence[str] = ()) -> dict[str, float]:
    """The values of a round, by names such as post/accuracy_worst10."""
    found: dict[str, float] = {
        "bytes/up": record.bytes_up,
        "bytes/down": record.bytes_down,
        "clients/participants": len(record.participants),
        "clients/left_out": len(record.left_out),
        **{f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()},
    }
    for point, split in record.scores:
        where = point if split == "test" else f"{split}_{point}"
        for name, value in record.summary(point, split)._asdict().items():
            if not math.isnan(value):  # no client has samples
                found[f"{where}/{name_of(record.metric.name, name)}"] = value
        if groups and split == "test" and not point.startswith("new_"):
            means = by_group(record.scores[point, split], groups)
            found |= {f"{where}/{record.metric.name}_{group}": value for group, value in means.items()}
    return found


def name_of(metric: str, field: str) -> str:
    """The name of a field of Summary, such as accuracy or accuracy_worst10."""
    return {"mean": metric, "loss": "loss"}.get(field, f"{metric}_{field}")


def outcome_values(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The final values, by names such as outcome/FedPAC/accuracy."""
    for outcome in result["outcomes"]:
        last = {name_of(result["metric"], name): value for name, value in outcome["last"].items()}
        best = {name: outcome[name] for name in ("best_on_test", "best_by_validation")}
        for name, value in (last | best).items():
            if value is not None:
                yield f"outcome/{outcome['name']}/{name}", value
    for model, metrics in (result.get("metrics") or {}).items():
        for name, numbers in metrics.items():
            if numbers["mean"] is not None:
                yield f"outcome/{model}/{name}", numbers["mean"]
    for name in ("rounds", "bytes_up", "bytes_down"):
        yield f"outcome/{name}", result[name]
    for phase, seconds in result["seconds"].items():
        yield f"outcome/seconds_{phase}", seconds
    yield "outcome/left_out", len(result["left_out"])


def read_marks(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(read_inside(path.parent, path.name)))
    except (OSError, ValueError, TypeError):
        return {}


def write_marks(path: Path, marks: Mapping[str, str]) -> None:
    with writing(path), whole(path) as part:
        part.write_text(json.dumps(marks, indent=2) + "\n", encoding="utf-8")


def in_words(error: Exception) -> str:
    said = str(getattr(error, "strerror", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__
