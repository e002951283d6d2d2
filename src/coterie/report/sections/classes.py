"""Classes: accuracy and F1 of each, and confusion matrices of clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.core.metric_scale import MetricScale
from coterie.report.elements import folded, paragraph, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import client_label
from coterie.report.seeds import SeedGroup, score_cell
from coterie.runs.stored_run import StoredRun

MOST_CLASSES = 30  # in a confusion matrix
MOST_CELLS = 60_000  # of confusion matrices of clients; keeps a report below a megabyte
SHARE = MetricScale(share=True)
Counts = NDArray[np.int64]
Measure = Callable[[Counts], list[float]]  # of every class


def class_view(groups: Sequence[SeedGroup]) -> Markup:
    """Accuracy and F1 of every class, and confusion matrices; empty for tasks without classes."""
    found = [(group, [counts for run in group.runs if (counts := confusion(run)) is not None]) for group in groups]
    found = [(group, matrices) for group, matrices in found if matrices]
    sizes = {len(counts) for _, matrices in found for counts in matrices}
    if len(sizes) != 1 or max(sizes) > MOST_CLASSES:
        return join()
    names = class_names(groups[0].run, sizes.pop())
    accuracies = class_table("Accuracy", "right of the samples of each class, in percent", found, names, recall)
    f1 = class_table("F1", "in percent", found, names, class_f1)
    return join(
        folded("Accuracy and F1 of every class", accuracies, f1),
        folded("Confusion matrices of every client", confusion_viewer([group for group, _ in found], names)),
    )


def class_names(run: StoredRun, count: int) -> tuple[str, ...]:
    table_of = run.class_table
    return table_of.names if table_of and len(table_of.names) == count else tuple(map(str, range(count)))


def confusion(run: StoredRun) -> Counts | None:
    """(K, K) of all clients: row = label, column = prediction; None if result.json has none."""
    try:
        counts: Counts = np.array((run.result or {}).get("confusion"), np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    return counts if counts.ndim == 2 and counts.shape[0] == counts.shape[1] > 0 else None


def recall(counts: Counts) -> list[float]:
    """Share of the samples of each class that are predicted right; NaN for a class without samples."""
    with np.errstate(invalid="ignore"):
        found: list[float] = (counts.diagonal() / counts.sum(1)).tolist()
    return found


def class_f1(counts: Counts) -> list[float]:
    with np.errstate(invalid="ignore"):
        found: list[float] = (2 * counts.diagonal() / (counts.sum(0) + counts.sum(1))).tolist()
    return found


def class_table(
    title: str, detail: str, found: Sequence[tuple[SeedGroup, Sequence[Counts]]], names: Sequence[str], measure: Measure
) -> Markup:
    """One row per class, one column per method, over all clients."""
    columns = [[measure(counts) for counts in matrices] for _, matrices in found]
    rows = [
        [name, *(score_cell([seed[k] for seed in seeds], SHARE) for seeds in columns)] for k, name in enumerate(names)
    ]
    caption = f"{title} of every class over all clients ({detail})"
    return table(caption, ["class", *(group.label for group, _ in found)], rows)


def confusion_viewer(groups: Sequence[SeedGroup], names: Sequence[str]) -> Markup:
    """The confusion matrix of a method and client that the reader chooses; report.js changes it."""
    room = MOST_CELLS // len(groups)
    methods = [{"name": g.label, "clients": [["all clients", total(g)], *client_matrices(g, room)]} for g in groups]
    seeds = max(len(group.entries) for group in groups)
    note = "Row: the class of a sample; column: the prediction. Shades are shares of a row."
    more = f" Counts are summed over {seeds} seeds." * (seeds > 1)
    known = [g for g in groups if g.same_clients and any(run.client_confusion for run in g.runs)]
    left = [g.label for g in known if not client_matrices(g, room)]
    less = f" {', '.join(left)}: too many numbers for a report; confusion.csv in the run folder has them." * bool(left)
    read = {"classes": list(names), "methods": methods}
    label = f"{groups[0].label}, all clients: samples by class and prediction"
    matrix = dense(total(groups[0]), len(names))
    made = table(label, ["class", *names], [[n, *map(str, row)] for n, row in zip(names, matrix.tolist(), strict=True)])
    choices = [tag("label", f"{word} ", tag("select", class_=word.lower())) for word in ("Method", "Client")]
    return tag(
        "div",
        tag("p", *choices, class_="choices", hidden=True),
        made,
        paragraph(note + more + less, class_="small"),
        class_="confusion",
        data_confusion=json.dumps(read, separators=(",", ":")),
    )


def total(group: SeedGroup) -> list[int]:
    """Label, prediction and samples of all clients, one after the other."""
    matrices = [counts for run in group.runs if (counts := confusion(run)) is not None]
    return sparse(np.sum(matrices, axis=0))


def sparse(counts: Counts) -> list[int]:
    return [int(n) for i, j in np.argwhere(counts) for n in (i, j, counts[i, j])]


def dense(cells: Sequence[int], classes: int) -> Counts:
    counts = np.zeros((classes, classes), np.int64)
    for i, j, n in np.reshape(cells, (-1, 3)):
        counts[i, j] = n
    return counts


def client_matrices(group: SeedGroup, room: int) -> list[tuple[str, list[int]]]:
    """Name and cells of every client, summed over seeds; empty if they have more than `room` cells.

    Empty too where each seed has its own clients.
    """
    if not group.same_clients:
        return []
    found: dict[int, dict[tuple[int, int], int]] = {}
    for run in group.runs:
        for client, label, predicted, samples in run.client_confusion if run.result else ():
            own = found.setdefault(client, {})
            own[label, predicted] = own.get((label, predicted), 0) + samples
    if sum(map(len, found.values())) > room:
        return []
    return [
        (client_label(group.run, client, ""), [n for (i, j), count in sorted(own.items()) for n in (i, j, count)])
        for client, own in sorted(found.items())
    ]
