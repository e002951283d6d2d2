"""The table of a paper: mean and interval over seeds, the best in bold, and marks of significance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.paired import LEVEL, ClientScores, verdicts
from coterie.analysis.significance import Spread
from coterie.analysis.tables import TextTable
from coterie.core.errors import CoterieError, unknown
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale

MARK = "†"


class TableColumn(NamedTuple):
    """A column of the table, from rows of `coterie compare`."""

    key: str
    heading: str
    metric: MetricScale | None = None  # None: not a score
    lower: bool = False  # whether the smallest is the best

    def values(self, group: Sequence[Mapping[str, Any]]) -> list[float]:
        scale = self.metric.factor if self.metric else 1.0
        found = [{**row.get("metrics", {}), **row}.get(self.key) for row in group]
        return [scale * float(value) for value in found if value is not None]

    def number(self, value: float) -> str:
        return self.metric.written(value) if self.metric else f"{value:.2f}"


COSTS = {
    "megabytes": TableColumn("megabytes", "MB sent", lower=True),
    "seconds": TableColumn("seconds", "seconds", lower=True),
}


def columns_of(metric: MetricScale, others: Sequence[MetricScale] = ()) -> dict[str, TableColumn]:
    """All columns by name; the first is named after the metric. others: all metrics of the task."""
    places = {
        metric.name: ("mean", metric.words),
        "worst10": ("worst10", "worst 10 %"),
        "std_clients": ("std", "SD clients"),
        "by_samples": ("by_samples", "by samples"),
        "before": ("pre", "before"),
        "after": ("post", "after"),
        "global": ("global", "global"),
        "by_validation": ("best_by_validation", "by validation"),
        "new_before": ("new_pre", "new: before"),
        "new_after": ("new_post", "new: after"),
        "new_global": ("new_global", "new: global"),
    }
    scores = {
        name: TableColumn(key, heading, metric, lower=key == "std" or not metric.higher)
        for name, (key, heading) in places.items()
    }
    every = {one.name: TableColumn(one.name, one.words, one, lower=not one.higher) for one in others}
    return scores | {name: column for name, column in every.items() if name not in scores} | COSTS


def publication(
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    samples: Mapping[str, ClientScores],
    caption: str,
    reference: str,
    columns: Sequence[str] = (),
    label: str | None = None,
    metric: MetricScale = ACCURACY_SCALE,
    others: Sequence[MetricScale] = (),
) -> TextTable:
    """The table, from the rows and the clients' scores of each method.

    reference: the method that the others are tested against. others: metrics that may be columns, too.
    """
    chosen = {name: column_of(name, columns_of(metric, others)) for name in columns or (metric.name, "worst10")}
    found = {
        name: [Spread.of(values) if (values := column.values(group)) else None for column in chosen.values()]
        for name, group in groups.items()
    }
    for at, name in enumerate(chosen):
        if not any(spreads[at] for spreads in found.values()):
            raise CoterieError(f"column '{name}': these runs did not measure it")
    tested, how = verdicts(samples, reference, metric)
    sure = {verdict.method for verdict in tested if verdict.p_holm < LEVEL}
    rows = [
        [name, *(shown(s, chosen[column]) + (MARK if column == metric.name and name in sure else "") for column, s in
                 zip(chosen, spreads, strict=True))]
        for name, spreads in found.items()
    ]  # fmt: skip
    seeds = max(map(len, groups.values()))
    says = [f"Mean ± half of the 95 % interval (Student's t) over {seeds} seeds."] if seeds > 1 else []
    bold = frozenset(
        (row, at + 1)
        for at, column in enumerate(chosen.values())
        for row in best([spreads[at] for spreads in found.values()], column)
    )
    says += ["Bold: best of the column."] if bold else []
    if tested and metric.name in chosen:  # tests are of this column
        at_level = f"from {reference} at 5 % (corrected by Holm)"
        says += [f"{MARK}: differs {at_level}." if sure else f"No method differs significantly {at_level}.", how]
    return TextTable(
        caption,
        ["method", *(column.heading for column in chosen.values())],
        rows,
        " ".join(says),
        bold,
        label or "",
    )


def column_of(name: str, known: Mapping[str, TableColumn]) -> TableColumn:
    if name not in known:
        raise unknown("column", name, known)
    return known[name]


def shown(spread: Spread | None, column: TableColumn) -> str:
    """Mean ± half of the 95 % interval."""
    if spread is None:
        return "-"
    half = "" if spread.half is None else f" ± {column.number(spread.half)}"
    return f"{column.number(spread.mean)}{half}"


def best(spreads: Sequence[Spread | None], column: TableColumn) -> list[int]:
    """Rows with the best mean, as it is shown; none if there is one row only."""
    means = [None if s is None else float(column.number(s.mean)) for s in spreads]
    known = [mean for mean in means if mean is not None]
    if len(means) < 2 or not known:
        return []
    top = min(known) if column.lower else max(known)
    return [row for row, mean in enumerate(means) if mean == top]
