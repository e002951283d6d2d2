"""Who is served well, and who is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from coterie.federation.history import POINTS
from coterie.reports import charts
from coterie.reports.charts import Row
from coterie.reports.elements import folded, grid, section, table
from coterie.reports.markup import Markup, join, tag
from coterie.reports.naming import WORDS, Entry, entries
from coterie.reports.reading import Run, Score


def clients(runs: Sequence[Run]) -> Markup:
    """Who is served well, and who is not."""
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
    """How evenly accuracy is spread; a column for each set of scores."""
    numbers = [spread(scores) for scores in columns.values()]
    rows = [[name, *(f"{own[name]:.2f}" for own in numbers)] for name in numbers[0]]
    rows.append(["clients", *(str(len(scores)) for scores in columns.values())])
    made = table("Accuracy over clients, percent", ["", *columns], rows)
    return tag("figure", tag("h3", "Fairness"), made, tag("figcaption", "By samples: every sample counts the same."))


def spread(scores: Sequence[Score]) -> dict[str, float]:
    values = sorted(s.percent for s in scores)
    return {
        "mean": float(np.mean(values)),
        "by samples": 100 * sum(s.correct for s in scores) / sum(s.total for s in scores),
        "standard deviation": float(np.std(values)),
        "worst 10 %": worst(values),
        "lowest": values[0],
        "median": median(values),
        "highest": values[-1],
    }


def worst(values: Sequence[float]) -> float:
    """Mean of the worst tenth, of at least one."""
    count = max(1, len(values) // 10)
    return sum(sorted(values)[:count]) / count


def sorted_clients(entry: Entry) -> Markup:
    scores = sorted(entry.run.scores[entry.point], key=lambda s: s.percent)
    values = [s.percent for s in scores]
    mean, tenth = sum(values) / len(values), max(1, len(values) // 10)
    row = Row(entry.name, values, [tip(entry.name, s) for s in scores])
    about = f"From {values[0]:.1f} to {values[-1]:.1f} percent, mean {mean:.1f}."
    title = f"{entry.name}: accuracy of every client, sorted"
    drawn = charts.bars(title, about, row, "clients, from worst to best", "accuracy, %", tenth, mean)
    caption = (
        f"Set apart: the worst 10 % of clients, {worst(values):.1f} % on average. Measured: {POINTS[entry.point]}."
    )
    return tag("figure", tag("h3", entry.name), drawn, tag("figcaption", caption))


def tip(name: str, score: Score) -> str:
    return f"{name}, client {score.client}: {score.percent:.1f} % ({score.correct} of {score.total})"


def client_table(found: Sequence[Entry]) -> Markup:
    own = [{s.client: s for s in e.run.scores[e.point]} for e in found]
    ids = sorted({client for scores in own for client in scores})
    rows = [
        [str(i), *(f"{s[i].percent:.2f} ({s[i].correct}/{s[i].total})" if i in s else "" for s in own)] for i in ids
    ]
    return table("Accuracy in percent (correct / test samples)", ["client", *(e.name for e in found)], rows)
