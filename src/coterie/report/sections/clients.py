"""Accuracy of individual clients, and how evenly it is spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from coterie.analysis.significance import wilson
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
    """Accuracy of individual clients, and how evenly it is spread."""
    found = [e for e in entries(runs) if e.run.scores.get(e.point)]
    if not found:
        return join()
    if len(runs) == 1:
        columns = {WORDS[point]: runs[0].scores[point] for point in POINTS if runs[0].scores.get(point)}
    else:
        columns = {e.name: e.run.scores[e.point] for e in found}
    figures = [*(sorted_clients(e) for e in found), fairness(columns)]
    return section("clients", "Clients", grid(figures), folded("Accuracy of every client", client_table(found)))


def fairness(columns: Mapping[str, Sequence[Score]]) -> Markup:
    """How evenly accuracy is spread; one column per set of scores."""
    numbers = [spread(scores) for scores in columns.values()]
    rows = [[name, *(f"{own[name]:.2f}" for own in numbers)] for name in numbers[0]]
    size = worst_tenth_text(map(len, columns.values()))
    rows = [[f"{WORST} ({size})", *row[1:]] if row[0] == WORST else row for row in rows]
    rows.append(["clients", *(str(len(scores)) for scores in columns.values())])
    made = table("Accuracy over clients, percent", ["", *columns], rows)
    return tag("figure", tag("h3", "Fairness"), made, tag("figcaption", "By samples: every sample counts the same."))


def spread(scores: Sequence[Score]) -> dict[str, float]:
    values = sorted(s.percent for s in scores)
    return {
        "mean": float(np.mean(values)),
        "by samples": 100 * sum(s.correct for s in scores) / sum(s.total for s in scores),
        "standard deviation": float(np.std(values)),
        WORST: worst(values),
        "lowest": values[0],
        "median": median(values),
        "highest": values[-1],
    }


def worst(values: Sequence[float]) -> float:
    """Mean of the worst tenth, at least one client."""
    count = worst_tenth(len(values))
    return sum(sorted(values)[:count]) / count


def sorted_clients(entry: Reported) -> Markup:
    scores = sorted(entry.run.scores[entry.point], key=lambda s: s.percent)
    values = [s.percent for s in scores]
    mean, tenth = sum(values) / len(values), worst_tenth(len(values))
    row = ChartRow(entry.name, values, [tip(entry, s) for s in scores])
    about = f"From {values[0]:.1f} to {values[-1]:.1f} percent, mean {mean:.1f}."
    title = f"{entry.name}: accuracy of every client, sorted"
    drawn = charts.bars(title, about, row, "clients, from worst to best", "accuracy, %", tenth, mean)
    caption = (
        f"Highlighted: the worst 10 % ({clients_text(tenth)}), {worst(values):.1f} % on average. "
        f"Measured: {POINTS[entry.point]}."
    )
    return tag("figure", tag("h3", entry.name), drawn, tag("figcaption", caption))


def tip(entry: Reported, score: Score) -> str:
    client = client_label(entry.run, score.client, entry.point)
    words = f"{score.percent:.1f} % ({score.correct} of {score.total}; 95 %: {between(score)})"
    return f"{entry.name}, client {client}: {words}"


def between(score: Score) -> str:
    """The 95 % interval in percent, such as 64 to 95; it is wide for clients with few test samples."""
    low, high = wilson(score.correct, score.total)
    return f"{100 * low:.0f} to {100 * high:.0f}"


def client_table(found: Sequence[Reported]) -> Markup:
    own = [{s.client: s for s in e.run.scores[e.point]} for e in found]
    ids = sorted({client for scores in own for client in scores})
    rows = [
        [
            client_label(found[0].run, i, found[0].point),
            *(f"{s[i].percent:.2f} ({s[i].correct}/{s[i].total}; {between(s[i])})" if i in s else "" for s in own),
        ]
        for i in ids
    ]
    title = "Accuracy in percent (correct / test samples; 95 % interval by Wilson's score)"
    return table(title, ["client", *(e.name for e in found)], rows)
