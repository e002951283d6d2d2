"""Every metric of the task, and the classes: F1 and confusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.report.elements import folded, paragraph, section, table
from coterie.report.markup import Markup, join
from coterie.report.naming import Named, named
from coterie.runs.run import Run

MOST_CLASSES = 30  # in a confusion matrix
Numbers = Mapping[str, Mapping[str, Mapping[str, Any]]]


def metrics(runs: Sequence[Run]) -> Markup:
    """All metrics after the last round: mean over clients and worst tenth, and the classes of each run."""
    found = [(own, numbers) for own in named(runs) if (numbers := numbers_of(own.run))]
    rows = [row for own, numbers in found for row in summary_rows(own, numbers)]
    if not rows:
        return join()
    names = list(dict.fromkeys(name for _, numbers in found for own in numbers.values() for name in own))
    scales = scales_of(found[0][0].run, names)
    header = ["run", "model", "", *(scale.heading for scale in scales.values())]
    body = [[*about, *(scales[name].number(own.get(name)) for name in names)] for about, own in rows]
    note = "Mean over clients after the last round, and mean of the worst 10 % of clients by each metric."
    classes = [class_tables(own) for own, _ in found]
    return section(
        "metrics", "All metrics", table("All metrics", header, body), paragraph(note, class_="small"), *classes
    )


def numbers_of(run: Run) -> Numbers:
    """Model -> metric -> mean and worst10, as far as result.json has them."""
    found = (run.result or {}).get("metrics")
    models = found if isinstance(found, dict) else {}
    return {
        str(model): {str(name): value for name, value in metrics.items() if isinstance(value, dict)}
        for model, metrics in models.items()
        if isinstance(metrics, dict)
    }


def summary_rows(own: Named, numbers: Numbers) -> list[tuple[list[str], dict[str, float | None]]]:
    """(run, model, which number), and metric -> value."""
    kinds = {"mean": "mean", "worst10": "worst 10 %"}
    return [
        ([own.name, model, words], {name: number(value.get(key)) for name, value in of.items()})
        for model, of in numbers.items()
        for key, words in kinds.items()
    ]


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def scales_of(run: Run, names: Sequence[str]) -> dict[str, MetricScale]:
    """The scale of each metric; of a task whose code is not loaded, values as they are."""
    try:
        known = {metric.name: metric.scale for metric in run.task.metrics}
    except (CoterieError, KeyError, TypeError, ValueError):  # code that is not loaded, or a damaged config.json
        known = {}
    return {name: known.get(name, MetricScale(name, share=False, counts=False)) for name in names}


def class_tables(own: Named) -> Markup:
    """F1 of every class, and the confusion matrix."""
    found = (own.run.result or {}).get("confusion")
    try:
        counts: NDArray[np.int64] = np.array(found, np.int64)
    except (TypeError, ValueError, OverflowError):
        return join()
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or not 0 < len(counts) <= MOST_CLASSES:
        return join()
    table_of = own.run.class_table
    names = table_of.names if table_of and len(table_of.names) == len(counts) else tuple(map(str, range(len(counts))))
    with np.errstate(invalid="ignore"):
        f1 = 2 * counts.diagonal() / (counts.sum(0) + counts.sum(1))
    rows = [
        [name, "" if np.isnan(score) else f"{100 * score:.2f}", *map(str, line)]
        for name, score, line in zip(names, f1, counts.tolist(), strict=True)
    ]
    title = f"{own.name}: F1 of every class in percent, and predictions (columns) of the samples of each class (rows)"
    return folded(f"Classes of {own.name}", table(title, ["class", "F1", *names], rows))
