"""When a run ends: after its last round, or earlier by a metric, lack of progress or time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError, unknown
from coterie.core.metric_scale import MetricScale
from coterie.core.validation import check_fields
from coterie.federation.history import Ended, Round, Summary

MEASURED = ("pre", "post", "global")  # points that are measured during the rounds
SPLITS = {"": "test", "validation_": "validation"}
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


class Condition(NamedTuple):
    """Such as accuracy>0.9."""

    metric: str
    sign: str
    value: float


@dataclass(frozen=True)
class Ending:
    """What ends a run before its last round. The round in progress is always completed."""

    until: str | None = field(
        default=None,
        metadata={"help": "end when a metric reaches a value, such as 'accuracy>0.9' (0 to 1) or 'rmse<2.5'"},
    )
    patience: int | None = field(
        default=None,
        metadata={
            "help": "end after this many measured rounds without a better validation score; needs --validation",
            "low": 1,
        },
    )
    max_time: str | float | None = field(
        default=None, metadata={"help": "end after this time, such as 2h, 90m or 1h30m; `coterie resume` continues"}
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if self.until is not None:
            parsed(self.until)
        if self.max_time is not None:
            seconds(self.max_time)

    def check(self, splits: Sequence[str], metric: MetricScale) -> None:
        """Raise an error for a metric that is not measured, and for a split that the data do not have."""
        if self.until is not None:
            condition(self.until, metric)
        if "validation" in splits:
            return
        if self.patience is not None:
            raise CoterieError("patience needs a validation split: set validation=0.1 or so (--validation 0.1)")
        if self.until is not None and parsed(self.until).metric.startswith("validation_"):
            raise CoterieError(
                f"until {self.until}: the data have no validation split; set validation=0.1 or so (--validation 0.1)"
            )

    def reached(self, records: Sequence[Round], point: str, spent: float) -> Ended | None:
        """Why the run ends after these rounds; None if it continues.

        point: where scores are measured if a metric does not say. spent: seconds that this call has trained.
        """
        number, last = len(records), records[-1]
        if self.until is not None and last.scores:
            metric, sign, limit = parsed(self.until)
            value = metric_of(last, metric, point)
            if value is None:
                raise CoterieError(f"until {self.until}: this method has no {metric}; it measures {measured(last)}")
            if COMPARE[sign](value, limit):
                return Ended("until", number, f"{self.until}: {metric} is {value:.4f}")
        if self.patience is not None and last.scores:
            best, waited = progress(records, point)
            if best is not None and waited >= self.patience:
                rounds = f"{waited} measured round{'s' if waited > 1 else ''}"
                reason = f"no better validation {last.metric.words} in {rounds}; the best was in round {best}"
                return Ended("patience", number, reason, best)
        if self.max_time is not None and spent >= seconds(self.max_time):
            return Ended("max_time", number, f"{self.max_time} have passed")
        return None


def names(metric: MetricScale) -> dict[str, str]:
    """Short names -> fields of Summary, at the point of measurement that a method reports."""
    return {metric.name: "mean"} | {name: name for name in Summary._fields if name != "mean"}


def metrics_of(metric: MetricScale) -> list[str]:
    """All metrics that a condition can name."""
    return [
        *(f"{prefix}{name}" for prefix in SPLITS for name in names(metric)),
        *(f"{prefix}{point}_{name}" for prefix in SPLITS for point in MEASURED for name in Summary._fields),
    ]


def parsed(text: str) -> Condition:
    """The parts of a condition; its metric may not exist."""
    found = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
    if not found:
        raise CoterieError(f"until must be a metric, one of > >= < <= and a number, such as accuracy>0.9, got '{text}'")
    name, sign, limit = found.groups()
    try:
        value = float(limit)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CoterieError(f"until {text}: '{limit}' is not a number")
    return Condition(name, sign, value)


def condition(text: str, metric: MetricScale) -> Condition:
    """A condition on this metric of a run."""
    made, known = parsed(text), metrics_of(metric)
    if made.metric not in known:
        raise unknown("metric for until", made.metric, known)
    if metric.share and not made.metric.endswith("loss") and not 0 <= made.value <= 1:
        hint = f"; did you mean {made.value / 100:g}?" if 1 < made.value <= 100 else ""
        raise CoterieError(f"until {text}: {made.metric} is between 0 and 1{hint}")
    return made


def seconds(text: str | float) -> float:
    """2h, 90m, 1h30m, 45s, or a number of seconds."""
    found = re.fullmatch(r"(?:\d+(?:\.\d+)?[dhms])+", str(text).replace(" ", ""))
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", str(text)) if found else []
    try:
        total = sum(float(number) * UNITS[unit] for number, unit in parts) if parts else float(text)
    except ValueError:
        total = 0.0
    if not 0 < total < math.inf:
        raise CoterieError(f"max-time must be a time such as 2h, 90m, 1h30m or 45s, got '{text}'")
    return total


def metric_of(record: Round, metric: str, point: str) -> float | None:
    """The value of one of `metrics_of` in a measured round; None where it is not measured."""
    prefix = "validation_" if metric.startswith("validation_") else ""
    name = metric.removeprefix(prefix)
    short = names(record.metric)
    at, field = (point, short[name]) if name in short else name.split("_", 1)
    if (at, SPLITS[prefix]) not in record.scores:
        return None
    value: float = getattr(record.summary(at, SPLITS[prefix]), field)
    return value


def measured(record: Round) -> str:
    return ", ".join(f"{'' if split == 'test' else 'validation_'}{point}_mean" for point, split in record.scores)


def progress(records: Sequence[Round], point: str) -> tuple[int | None, int]:
    """The round with the best validation score, the first of equals, and how many measured rounds came after it."""
    best: int | None = None
    reached, waited = math.nan, 0
    for record in records:
        score = record.score(point, "validation")
        if score is None or math.isnan(score):
            continue
        waited += 1
        if best is None or record.metric.better(score, reached):
            best, reached, waited = record.number, score, 0
    return best, waited


def reported_point(results: Any, everyone: bool) -> str:
    """Where the metric is measured: where the method's paper reports, if that is measured on all clients every round.

    results: of the method, name -> point. everyone: whether all clients take part in every round.
    """
    usable = ("pre", "global", "post") if everyone else ("pre", "global")
    return next((point for point in results.values() if point in usable), "pre")
