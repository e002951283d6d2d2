"""The table of a paper: mean and interval over seeds, the best in bold, and marks of significance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.paired import LEVEL, Accuracies, verdicts
from coterie.analysis.significance import Spread
from coterie.analysis.tables import TextTable
from coterie.core.errors import CoterieError, unknown

MARK = "†"
DEFAULT = ("accuracy", "worst10")


class TableColumn(NamedTuple):
    """A column of the table, from rows of `coterie compare`."""

    key: str
    heading: str
    scale: float = 100.0
    lower: bool = False  # whether the smallest is the best

    def values(self, group: Sequence[Mapping[str, Any]]) -> list[float]:
        return [self.scale * float(row[self.key]) for row in group if row.get(self.key) is not None]


COLUMNS = {
    "accuracy": TableColumn("mean", "accuracy"),
    "worst10": TableColumn("worst10", "worst 10 %"),
    "std_clients": TableColumn("std", "± clients", lower=True),
    "by_samples": TableColumn("by_samples", "by samples"),
    "before": TableColumn("pre", "before"),
    "after": TableColumn("post", "after"),
    "global": TableColumn("global", "global"),
    "by_validation": TableColumn("best_by_validation", "by validation"),
    "new_before": TableColumn("new_pre", "new: before"),
    "new_after": TableColumn("new_post", "new: after"),
    "new_global": TableColumn("new_global", "new: global"),
    "megabytes": TableColumn("megabytes", "MB sent", 1.0, lower=True),
    "seconds": TableColumn("seconds", "seconds", 1.0, lower=True),
}


def publication(
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    samples: Mapping[str, Accuracies],
    caption: str,
    columns: Sequence[str] = (),
    against: str | None = None,
    label: str | None = None,
) -> TextTable:
    """The table, from the rows and the accuracies of each method. against: default: the best in accuracy."""
    chosen = {name: column_of(name) for name in columns or DEFAULT}
    found = {
        name: [Spread.of(values) if (values := column.values(group)) else None for column in chosen.values()]
        for name, group in groups.items()
    }
    for at, name in enumerate(chosen):
        if not any(spreads[at] for spreads in found.values()):
            raise CoterieError(f"column '{name}': these runs did not measure it")
    means = {name: sum(row["mean"] for row in group) / len(group) for name, group in groups.items()}
    reference = against or max(means, key=lambda name: means[name])
    tested, how = verdicts(samples, reference)
    sure = {verdict.method for verdict in tested if verdict.p_holm < LEVEL}
    rows = [
        [name, *(shown(s) + (MARK if column == "accuracy" and name in sure else "") for column, s in
                 zip(chosen, spreads, strict=True))]
        for name, spreads in found.items()
    ]  # fmt: skip
    bold = frozenset(
        (row, at + 1)
        for at, column in enumerate(chosen.values())
        for row in best([spreads[at] for spreads in found.values()], column.lower)
    )
    return TextTable(
        caption,
        ["method", *(column.heading for column in chosen.values())],
        rows,
        note(max(map(len, groups.values())), reference, how, len(tested)),
        bold,
        label or "",
    )


def column_of(name: str) -> TableColumn:
    if name not in COLUMNS:
        raise unknown("column", name, COLUMNS)
    return COLUMNS[name]


def shown(spread: Spread | None) -> str:
    """Mean ± half of the 95 % interval."""
    if spread is None:
        return "-"
    return f"{spread.mean:.2f}" if spread.half is None else f"{spread.mean:.2f} ± {spread.half:.2f}"


def best(spreads: Sequence[Spread | None], lower: bool) -> list[int]:
    """Rows with the best mean, as it is shown; none if there is one row only."""
    means = [None if s is None else round(s.mean, 2) for s in spreads]
    known = [mean for mean in means if mean is not None]
    if len(means) < 2 or not known:
        return []
    top = min(known) if lower else max(known)
    return [row for row, mean in enumerate(means) if mean == top]


def note(seeds: int, reference: str, how: str, tests: int) -> str:
    interval = f"Mean ± half the 95 % interval (Student's t) over {seeds} seeds. " if seeds > 1 else ""
    marks = f"{MARK}: differs from {reference} at 5 % (corrected by Holm). {how}" if tests else ""
    return f"{interval}Bold: best of the column. {marks}".strip()
