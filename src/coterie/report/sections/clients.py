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
from coterie.report.elements import chart_figure, folded, grid, legend, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import WORDS, Reported, client_label
from coterie.report.sections.rounds import band_words, interval_words
from coterie.report.seeds import SeedGroup, grouped, series, with_interval
from coterie.runs.stored_run import StoredRun
from coterie.runs.tables import Score

WORST = "worst 10 %"
SPREAD = ("by samples", "lowest", "median", "highest")  # of methods, in addition to the summary
BY_SAMPLES = "By samples: every sample counts the same."


def clients(runs: Sequence[StoredRun]) -> Markup:
    """Scores of individual clients, and how evenly they are spread."""
    groups = [g for g in grouped(runs) if any(run.last_scores.get(g.point) for run in g.runs)]
    if not groups:
        return join()
    metric = runs[0].metric
    if len(runs) == 1:
        (run,) = runs
        columns = {WORDS[point]: run.last_scores[point] for point in POINTS if run.last_scores.get(point)}
        figures = [*(sorted_clients(g.entries[0]) for g in groups), fairness(columns, metric)]
    else:
        figures = [ranked_clients(groups, metric), fairness_of_methods(groups, metric)]
    same = all(group.same_clients for group in groups)
    every = [folded(f"{metric.title} of every client", client_table(groups))] if same else []
    return section("clients", "Clients", grid(figures), *every)


def fairness(columns: Mapping[str, Sequence[Score]], metric: MetricScale) -> Markup:
    """How evenly scores are spread; one column per set of scores."""
    numbers = [spread(scores, metric) for scores in columns.values()]
    rows = [[name, *(metric.written(own[name]) for own in numbers)] for name in numbers[0]]
    size = worst_tenth_text(map(len, columns.values()))
    rows = [[f"{WORST} ({size})", *row[1:]] if row[0] == WORST else row for row in rows]
    rows.append(["clients", *(str(len(scores)) for scores in columns.values())])
    made = table(f"{metric.title} over clients{', percent' * metric.share}", ["", *columns], rows)
    return tag("figure", tag("h3", "Fairness"), made, tag("figcaption", BY_SAMPLES))


def fairness_of_methods(groups: Sequence[SeedGroup], metric: MetricScale) -> Markup:
    """How evenly scores are spread; one row per method, with means and intervals over seeds."""
    found = {g.label: [spread(s, metric) for run in g.runs if (s := run.last_scores.get(g.point))] for g in groups}
    rows = [
        [label, *(with_interval([one[name] for one in own], metric.written) for name in SPREAD)]
        for label, own in found.items()
    ]
    made = table(f"{metric.title} over clients{', percent' * metric.share}", ["method", *SPREAD], rows)
    more = f"{interval_words(groups)} Standard deviation and worst 10 % are in the table of the summary."
    return tag("figure", tag("h3", "Fairness"), made, tag("figcaption", f"{BY_SAMPLES}{more}"))


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


def ranked_clients(groups: Sequence[SeedGroup], metric: MetricScale) -> Markup:
    """Scores of clients from worst to best: one line per method, and the band over seeds."""
    lines = [series(group.label, points, group.look) for group in groups if (points := group.ranked())]
    if not lines:
        return join()
    name, unit = "From the worst client to the best", " percent" * metric.share
    ends = [(metric.written(s.points[0][1], 1), metric.written(s.points[-1][1], 1)) for s in lines]
    about = "; ".join(f"{s.name}: from {low} to {high}{unit}" for s, (low, high) in zip(lines, ends, strict=True))
    title = f"{metric.title} of clients, from the worst to the best"
    drawn = charts.lines(title, about, lines, "clients from worst to best, %", metric.heading, most=metric.most)
    caption = f"The clients of each method are sorted by their own {metric.words}.{band_words(groups)}"
    return chart_figure(name, drawn, legend(lines), caption)


def sorted_clients(entry: Reported) -> Markup:
    metric = entry.run.metric
    scores = sorted(entry.run.last_scores[entry.point], key=lambda s: s.value, reverse=not metric.higher)
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


def client_table(groups: Sequence[SeedGroup]) -> Markup:
    """One row per client, one column per method; of several seeds, mean and interval."""
    metric = groups[0].run.metric
    several = max(len(group.entries) for group in groups) > 1
    own = [[{s.client: s for s in run.last_scores.get(g.point, ())} for run in g.runs] for g in groups]
    ids = sorted({client for seeds in own for scores in seeds for client in scores})
    rows = [
        [
            client_label(groups[0].run, i, groups[0].point),
            *(client_cell([scores[i] for scores in seeds if i in scores], metric, several) for seeds in own),
        ]
        for i in ids
    ]
    counts = "correct / test samples; 95 % interval by Wilson's score" if metric.counts else "test samples"
    detail = "mean over seeds ± half of the 95 % interval" if several else counts
    title = f"{metric.title}{' in percent' * metric.share} ({detail})"
    return table(title, ["client", *(g.label for g in groups)], rows)


def client_cell(scores: Sequence[Score], metric: MetricScale, several: bool) -> str:
    if several:
        return with_interval([metric.factor * s.value for s in scores], metric.written)
    return cell(scores[0], metric) if scores else ""


def cell(score: Score, metric: MetricScale) -> str:
    samples = f"{score.total}" if score.correct is None else f"{score.correct}/{score.total}"
    return f"{metric.number(score.value)} ({samples}{between(score, '; ')})"
