"""Scores over rounds."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core.metric_scale import MetricScale
from coterie.federation.history import POINTS, worst_tenth_text
from coterie.report import charts
from coterie.report.charts import Series
from coterie.report.elements import folded, grid, legend, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import WORDS, entries, named
from coterie.runs.run import Run


def over_rounds(runs: Sequence[Run]) -> Markup:
    """Curves over rounds: what all runs report in one chart, then all points of each run."""
    each = [(run, name) for run, name, _ in named(runs) if run.measured]
    if not each:
        return join()
    figures = [run_curves(run, name) for run, name in each]
    if len(each) == 1:
        figures.append(least(points_of(each[0][0], "worst10"), [each[0][0]]))
    else:
        reported = [Series(e.name, e.run.curve(e.point), e.look) for e in entries(runs)]
        lowest = [Series(e.name, e.run.curve(e.point, measure="worst10"), e.look) for e in entries(runs)]
        about = "What each method's paper reports: mean over clients, after every measured round."
        joint = curves("All runs", about, reported, runs[0].metric)
        figures = [joint, least(lowest, [run for run, _ in each]), *figures]
    return section("rounds", f"{runs[0].metric.title} over rounds", grid(figures))


def points_of(run: Run, measure: str = "mean") -> list[Series]:
    return [Series(WORDS[point], run.curve(point, measure=measure), i) for i, point in enumerate(run.measured)]


def run_curves(run: Run, name: str) -> Markup:
    about = "; ".join(f"{WORDS[point]}: {POINTS[point]}" for point in run.measured) + "."
    return curves(name, about, points_of(run), run.metric, folded("Numbers of every round", round_table(run, name)))


def least(series: Sequence[Series], runs: Sequence[Run]) -> Markup:
    series = [s for s in series if s.points]
    if not series:
        return join()
    counts = [len(scores) for run in runs for scores in run.scores.values() if scores]
    size = f" ({worst_tenth_text(counts)})" if counts else ""
    metric = runs[0].metric
    side = "lowest" if metric.higher else "highest"
    about = f"Mean {metric.words} of the 10 %{size} with the {side} {metric.words} in that round."
    return curves("The worst 10 % of clients", about, series, metric)


def curves(name: str, about: str, series: Sequence[Series], metric: MetricScale, *more: str) -> Markup:
    unit = " percent" * metric.share
    ends = "; ".join(f"{s.name} ends at {metric.written(s.points[-1][1], 1)}{unit}" for s in series)
    title, axis = f"{name}: {metric.words} over rounds", f"mean {metric.heading}"
    drawn = charts.lines(title, ends, series, "round", axis, most=metric.most)
    return tag("figure", tag("h3", name), drawn, legend(series, metric), tag("figcaption", about), *more)


def round_table(run: Run, name: str) -> Markup:
    columns = {
        f"{WORDS[point]}{' (validation)' if split else ''}": dict(curve)
        for split in ("", "validation_")
        for point in POINTS
        if (curve := run.curve(point, split))
    }
    rows, sent = [], 0.0
    for number, row in run.rounds.items():
        up, down = row.get("bytes_up", 0.0), row.get("bytes_down", 0.0)
        sent += up + down
        seconds = sum(v for key, v in row.items() if key.startswith("seconds_"))
        scores = [run.metric.written(own[number]) if number in own else "" for own in columns.values()]
        joined = f"{row.get('participants', 0):.0f}"
        rows.append([str(number), joined, *scores, *(f"{v / 1e6:.3f}" for v in (up, down, sent)), f"{seconds:.2f}"])
    header = ["round", "clients", *columns, "MB up", "MB down", "MB so far", "seconds"]
    return table(f"{name}: mean {run.metric.words}{' in percent' * run.metric.share}, traffic and time", header, rows)
