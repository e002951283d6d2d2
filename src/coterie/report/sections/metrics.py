"""Every metric of the task: of methods, of clients, and of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.federation.finals import PERSONAL
from coterie.report.elements import folded, paragraph, section, table
from coterie.report.markup import Markup, join
from coterie.report.naming import client_label
from coterie.report.sections.classes import class_view
from coterie.report.sections.rounds import interval_words
from coterie.report.seeds import SeedGroup, grouped, score_cell, trained
from coterie.runs.stored_run import StoredRun

Numbers = Mapping[str, Mapping[str, Mapping[str, Any]]]
KINDS = {"mean": "mean", "worst10": "worst 10 %"}


def metrics(runs: Sequence[StoredRun]) -> Markup:
    """All metrics after the last round: of each method, each client and each class."""
    every = grouped(runs)
    groups = [own_models(g, every) for g in trained(every) if any(numbers_of(run) for run in g.runs)]
    if not groups:
        return join()
    found = [numbers_of(run) for g in groups for run in g.runs]
    names = list(dict.fromkeys(name for numbers in found for own in numbers.values() for name in own))
    scales = scales_of(groups[0].run, names)
    note = f"Mean over clients after the last round, of each client's own model.{interval_words(groups)}"
    rest = "Mean of the worst 10 % of clients by each metric, and the global model"
    return section(
        "metrics",
        "All metrics",
        table("All metrics", ["method", *headings(scales)], method_rows(groups, scales, main=True)),
        paragraph(note, class_="small"),
        folded(rest, table(rest, ["method", "model", "", *headings(scales)], method_rows(groups, scales, main=False))),
        client_metrics(groups, scales),
        class_view(groups),
    )


def own_models(group: SeedGroup, every: Sequence[SeedGroup]) -> SeedGroup:
    """The group that reports the clients' own models of these runs: FedAvg-FT where FedAvg reports the global one."""
    try:
        return next((g for g in every if g.run is group.run and g.point == group.run.point), group)
    except CoterieError:  # its tables are damaged, which the report says elsewhere
        return group


def headings(scales: Mapping[str, MetricScale]) -> list[str]:
    return [scale.heading for scale in scales.values()]


def numbers_of(run: StoredRun) -> Numbers:
    """Model -> metric -> mean and worst10, as far as result.json has them."""
    found = (run.result or {}).get("metrics")
    models = found if isinstance(found, dict) else {}
    return {
        str(model): {str(name): value for name, value in metrics.items() if isinstance(value, dict)}
        for model, metrics in models.items()
        if isinstance(metrics, dict)
    }


def method_rows(groups: Sequence[SeedGroup], scales: Mapping[str, MetricScale], main: bool) -> list[list[str]]:
    """Rows of means over seeds. main: the mean over clients of personal models; else all other numbers."""
    rows = []
    for group in groups:
        found = [numbers_of(run) for run in group.runs]
        for model in dict.fromkeys(model for numbers in found for model in numbers):
            for key, words in KINDS.items():
                if ((model, key) == (PERSONAL, "mean")) != main:
                    continue
                own = [numbers.get(model, {}) for numbers in found]
                cells = [score_cell([number(m.get(name, {}).get(key)) for m in own], s) for name, s in scales.items()]
                rows.append([group.label, *([] if main else [model, words]), *cells])
    return rows


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def scales_of(run: StoredRun, names: Sequence[str]) -> dict[str, MetricScale]:
    """The scale of each metric; of a task whose code is not loaded, values as they are."""
    try:
        known = {metric.name: metric.scale for metric in run.task.metrics}
    except (CoterieError, KeyError, TypeError, ValueError):  # code that is not loaded, or a damaged config.json
        known = {}
    return {name: known.get(name, MetricScale(name, share=False, counts=False)) for name in names}


def client_metrics(groups: Sequence[SeedGroup], scales: Mapping[str, MetricScale]) -> Markup:
    """For each method, all metrics of every client's own model."""
    made = [client_table(group, scales) for group in groups if group.same_clients and any(map(personal, group.runs))]
    return folded("Every client", *made) if made else join()


def personal(run: StoredRun) -> Mapping[int, Mapping[str, float]]:
    """Client -> metric -> value of its own model; empty for a run that has not finished."""
    return run.client_metrics.get(PERSONAL, {}) if run.result else {}


def client_table(group: SeedGroup, scales: Mapping[str, MetricScale]) -> Markup:
    found = [personal(run) for run in group.runs]
    clients = sorted({client for own in found for client in own})
    rows = [
        [
            client_label(group.run, client, PERSONAL),
            *(score_cell([own.get(client, {}).get(name) for own in found], s) for name, s in scales.items()),
        ]
        for client in clients
    ]
    return table(f"{group.label}: all metrics of every client", ["client", *headings(scales)], rows)
