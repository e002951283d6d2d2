"""Scores of individual clients, and how evenly they are spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from coterie.analysis.significance import wilson
from coterie.core.metric_scale import MetricScale
from coterie.federation.history import POINTS, clients_text, worst_tenth, worst_tenth_text
from coterie.report import charts
from coterie.report.charts import ChartRow
from coterie.report.elements import folded, grid, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import WORDS, Reported, client_label, entries
from coterie.runs.run import Run
from coterie.runs.tables import Score

WORST = "worst 10 %"


def clients(runs: Sequence[Run]) -> Markup:
    """Scores of individual clients, and how evenly they are spread."""
    found = [e for e in entries(runs) if e.run.scores.get(e.point)]
    if not found:
        return join()
    if len(runs) == 1:
        columns = {WORDS[point]: runs[0].scores[point] for point in POINTS if runs[0].scores.get(point)}
    else:
        columns = {e.name: e.run.scores[e.point] for e in found}
    metric = runs[0].metric
    figures = [*(sorted_clients(e) for e in found), fairness(columns, metric)]
    every = folded(f"{metric.title} of every client", client_table(found))
    return section("clients", "Clients", grid(figures), every)


def fairness(columns: Mapping[str, Sequence[Score]], metric: MetricScale) -> Markup:
    """How evenly scores are spread; one column per set of scores."""
    numbers = [spread(scores, metric) for scores in columns.values()]
    rows = [[name, *(metric.written(own[name]) for own in numbers)] for name in numbers[0]]
    size = worst_tenth_text(map(len, columns.values()))
    rows = [[f"{WORST} ({size})", *row[1:]] if row[0] == WORST else row for row in rows]
    rows.append(["clients", *(str(len(scores)) for scores in columns.values())])
    made = table(f"{metric.title} over clients{', percent' * metric.share}", ["", *columns], rows)
    return tag("figure", tag("h3", "Fairness"), made, tag("figcaption", "By samples: every sample counts the same."))


def spread(scores: Sequence[Score], metric: MetricScale) -> dict[str, float]:
    values = sorted(metric.factor * s.value for s in scores)
    return {
        "mean": float(np.mean(values)),
        "by samples": metric.factor * sum(s.value * s.total for s in scores) / sum(s.total for s in scores),
        "standard deviation": float(np.std(values)),
        WORST: worst(metric.from_worst(values)),
        "lowest": values[0],
        "median": median(values),
        "highest": values[-1],
    }


def worst(values: Sequence[float]) -> float:
    """Mean of the worst tenth, at least one client. values: from the worst to the best."""
    count = worst_tenth(len(values))
    return sum(values[:count]) / count


def sorted_clients(entry: Reported) -> Markup:
    metric = entry.run.metric
    scores = sorted(entry.run.scores[entry.point], key=lambda s: s.value, reverse=not metric.higher)
    values = [metric.factor * s.value for s in scores]
    mean, tenth = sum(values) / len(values), worst_tenth(len(values))
    row = ChartRow(entry.name, values, [tip(entry, s) for s in scores])
    first, last, middle = (metric.written(value, 1) for value in (values[0], values[-1], mean))
    about = f"From {first} to {last}{' percent' * metric.share}, mean {middle}."
    title = f"{entry.name}: {metric.words} of every client, sorted"
    drawn = charts.bars(title, about, row, "clients, from worst to best", metric, tenth, mean)
    low = f"{metric.written(worst(values), 1)}{' %' * metric.share}"
    caption = f"Highlighted: the worst 10 % ({clients_text(tenth)}), {low} on average. Measured: {POINTS[entry.point]}."
    return tag("figure", tag("h3", entry.name), drawn, tag("figcaption", caption))


def tip(entry: Reported, score: Score) -> str:
    client = client_label(entry.run, score.client, entry.point)
    samples = f"{score.total} samples" if score.correct is None else f"{score.correct} of {score.total}"
    words = f"{entry.run.metric.text(score.value, 1)} ({samples}{between(score, '; 95 %: ')})"
    return f"{entry.name}, client {client}: {words}"


def between(score: Score, before: str) -> str:
    """The 95 % interval in percent, such as 64 to 95; it is wide for clients with few test samples."""
    if score.correct is None:
        return ""
    low, high = wilson(score.correct, score.total)
    return f"{before}{100 * low:.0f} to {100 * high:.0f}"


def client_table(found: Sequence[Reported]) -> Markup:
    metric = found[0].run.metric
    own = [{s.client: s for s in e.run.scores[e.point]} for e in found]
    ids = sorted({client for scores in own for client in scores})
    rows = [
        [
            client_label(found[0].run, i, found[0].point),
            *(cell(s[i], metric) if i in s else "" for s in own),
        ]
        for i in ids
    ]
    counts = "correct / test samples; 95 % interval by Wilson's score" if metric.counts else "test samples"
    title = f"{metric.title}{' in percent' * metric.share} ({counts})"
    return table(title, ["client", *(e.name for e in found)], rows)


def cell(score: Score, metric: MetricScale) -> str:
    samples = f"{score.total}" if score.correct is None else f"{score.correct}/{score.total}"
    return f"{metric.number(score.value)} ({samples}{between(score, '; ')})"
