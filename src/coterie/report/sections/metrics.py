"""Every metric of the task: of methods, of clients, and of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.federation.finals import PERSONAL
from coterie.report.elements import folded, paragraph, section, table
from coterie.report.final_metrics import model_of, numbers_of, scales_of
from coterie.report.markup import Markup, join
from coterie.report.naming import client_label
from coterie.report.sections.classes import class_view
from coterie.report.sections.rounds import interval_words
from coterie.report.seeds import SeedGroup, grouped, score_cell, trained
from coterie.runs.stored_run import StoredRun

KINDS = {"mean": "mean", "worst10": "worst 10 %"}


class ModelMetrics(NamedTuple):
    """The final metrics of one model of a method."""

    group: SeedGroup
    model: str
    reported: bool  # whether the group's number is of this model

    def means(self, key: str = "mean") -> list[dict[str, float | None]]:
        """For each seed: metric -> mean over clients, or over the worst tenth of them."""
        found = [numbers_of(run).get(self.model, {}) for run in self.group.runs]
        return [{name: number(value.get(key)) for name, value in own.items()} for own in found]


def metrics(runs: Sequence[StoredRun]) -> Markup:
    """All metrics after the last round: of each method, each client and each class."""
    every = grouped(runs)
    own = [own_models(g, every) for g in trained(every) if any(map(numbers_of, g.runs))]
    found = measured(every, own)
    if not found:
        return join()
    names = list(dict.fromkeys(name for one in found for seed in one.means() for name in seed))
    scales = scales_of(found[0].group.run, names)
    main = [[one.group.label, *cells(one, scales)] for one in found if one.reported]
    more = [
        [one.group.label, one.model, words, *cells(one, scales, key)]
        for one in found
        for key, words in KINDS.items()
        if not one.reported or key != "mean"
    ]
    note = f"Mean over clients after the last round, of the models that the methods report.{interval_words(own)}"
    rest = "Mean of the worst 10 % of clients by each metric, and the global model"
    return section(
        "metrics",
        "All metrics",
        table("All metrics", ["method", *headings(scales)], main),
        paragraph(note, class_="small"),
        folded(rest, table(rest, ["method", "model", "", *headings(scales)], more)),
        client_metrics(found, scales),
        class_view(own),
    )


def measured(every: Sequence[SeedGroup], own: Sequence[SeedGroup]) -> list[ModelMetrics]:
    """The models of all groups, then those that no group reports. own: groups that report what the clients keep."""
    found = []
    for group in every:
        models = [model for run in group.runs if (model := model_of(run, group.point))]
        models += [PERSONAL] * any(group is one for one in own)
        found += [ModelMetrics(group, model, True) for model in models[:1]]
    known = {(id(run), one.model) for one in found for run in one.group.runs}
    for group in own:
        models = list(dict.fromkeys(model for run in group.runs for model in numbers_of(run)))
        found += [ModelMetrics(group, model, False) for model in models if (id(group.run), model) not in known]
    return found


def own_models(group: SeedGroup, every: Sequence[SeedGroup]) -> SeedGroup:
    """The group that reports the clients' own models of these runs: FedAvg-FT where FedAvg reports the global one."""
    try:
        return next((g for g in every if g.run is group.run and g.point == group.run.point), group)
    except CoterieError:  # its tables are damaged, which the report says elsewhere
        return group


def headings(scales: Mapping[str, MetricScale]) -> list[str]:
    return [scale.heading for scale in scales.values()]


def cells(one: ModelMetrics, scales: Mapping[str, MetricScale], key: str = "mean") -> list[str]:
    seeds = one.means(key)
    return [score_cell([seed.get(name) for seed in seeds], scale) for name, scale in scales.items()]


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def client_metrics(found: Sequence[ModelMetrics], scales: Mapping[str, MetricScale]) -> Markup:
    """For each number that a method reports, all metrics of every client."""
    made = [
        client_table(one, scales)
        for one in found
        if one.reported and one.group.same_clients and any(of_clients(run, one.model) for run in one.group.runs)
    ]
    return folded("Every client", *made) if made else join()


def of_clients(run: StoredRun, model: str) -> Mapping[int, Mapping[str, float]]:
    """Client -> metric -> value of a model; empty for a run that has not finished."""
    return run.client_metrics.get(model, {}) if run.result else {}


def client_table(one: ModelMetrics, scales: Mapping[str, MetricScale]) -> Markup:
    group, found = one.group, [of_clients(run, one.model) for run in one.group.runs]
    clients = sorted({client for own in found for client in own})
    rows = [
        [
            client_label(group.run, client, PERSONAL),
            *(score_cell([own.get(client, {}).get(name) for own in found], s) for name, s in scales.items()),
        ]
        for client in clients
    ]
    return table(f"{group.label}: all metrics of every client", ["client", *headings(scales)], rows)
