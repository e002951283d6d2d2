"""How values of a metric are compared, shown and stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

ACRONYMS = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "auroc": "AUROC", "miou": "mIoU", "f1": "F1"}
T = TypeVar("T")


class MetricScale(NamedTuple):
    """How values of a metric are compared and shown. Records and run folders hold it."""

    name: str = "accuracy"
    higher: bool = True  # whether larger values are better
    share: bool = True  # whether values are in 0..1, and shown in percent
    counts: bool = True  # whether a value is the share of samples that are right

    @property
    def words(self) -> str:
        """Such as: balanced accuracy."""
        return " ".join(ACRONYMS.get(word, word) for word in self.name.split("_"))

    @property
    def title(self) -> str:
        """At the start of a heading, such as: Balanced accuracy."""
        return self.words if self.name in ACRONYMS else f"{self.words[:1].upper()}{self.words[1:]}"

    @property
    def heading(self) -> str:
        """Of a column or an axis, such as: accuracy, %."""
        return f"{self.words}, %" if self.share else self.words

    @property
    def factor(self) -> float:
        """From a value to the number that is shown."""
        return 100.0 if self.share else 1.0

    @property
    def most(self) -> float:
        """The largest number that can be shown."""
        return 100.0 if self.share else math.inf

    def number(self, value: float | None, digits: int = 2) -> str:
        """A value under its heading. digits: decimals of a percentage; other metrics have four significant digits."""
        if value is None or math.isnan(value):
            return ""
        return self.written(self.factor * value, digits)

    def written(self, shown: float, digits: int = 2) -> str:
        """A number as it is shown, which is a value times `factor`."""
        return f"{shown:.{digits}f}" if self.share else f"{shown:.4g}"

    def text(self, value: float, digits: int = 2) -> str:
        """A value with its unit; or that it is undefined."""
        if math.isnan(value):
            return "undefined"
        return f"{self.number(value, digits)}{' %' * self.share}"

    def best(self, values: Iterable[T], key: Callable[[T], float]) -> T:
        """The first of the best."""
        return max(values, key=key) if self.higher else min(values, key=key)

    def better(self, value: float, than: float) -> bool:
        return value > than if self.higher else value < than

    def from_worst(self, values: Iterable[float]) -> list[float]:
        """Sorted from the worst to the best."""
        return sorted(values, reverse=not self.higher)

    def stored(self, value: float) -> float:
        """As tables on disk hold it: shares with six decimals, other metrics with nine significant digits."""
        return round(value, 6) if self.share else float(f"{value:.9g}")


ACCURACY_SCALE = MetricScale()
