"""Scores over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coterie.analysis.looks import DASHES, MARKERS, Look, numbered
from coterie.core.metric_scale import MetricScale
from coterie.federation.history import POINTS, worst_tenth_text
from coterie.report import charts
from coterie.report.charts import Series
from coterie.report.elements import chart_figure, folded, grid, legend, section, table
from coterie.report.markup import Markup, join
from coterie.report.naming import WORDS
from coterie.report.seeds import SeedGroup, common, grouped, series, trained, with_interval
from coterie.runs.stored_run import StoredRun


def over_rounds(runs: Sequence[StoredRun]) -> Markup:
    """Curves over rounds: what all methods report in one chart, then all points of each training."""
    groups = grouped(runs)
    each = trained(groups)
    if not each:
        return join()
    heading = f"{runs[0].metric.title} over rounds"
    if len(each) == 1:
        own = each[0]
        several = len(own.runs) > 1
        worst = points_of(own, "worst10", numbered) if not several else [curve_of(own, "worst10")]
        figures = [point_curves(own, numbered), least(worst, own.runs)]
        return section("rounds", heading, grid(figures))
    about = f"What each method's paper reports: mean over clients, after every measured round.{band_words(groups)}"
    joint = curves("All runs", about, [curve_of(g) for g in groups], runs[0].metric)
    figures = [joint, least([curve_of(g, "worst10") for g in groups], [run for g in each for run in g.runs])]
    points = [point_curves(g, partial(dashed, g.look.color)) for g in each]
    more = folded(f"Every method: {listed_points(each)}, and the numbers of every round", grid(points))
    return section("rounds", heading, grid(figures), more)


def dashed(color: int, number: int) -> Look:
    """The look of a point of measurement in the color of its method."""
    return Look(color, number % DASHES, number % MARKERS)


def listed_points(groups: Sequence[SeedGroup]) -> str:
    found = dict.fromkeys(WORDS[point] for group in groups for point in group.run.measured)
    return ", ".join(found)


def band_words(groups: Sequence[SeedGroup]) -> str:
    """How many seeds a line is the mean of, and what the band is; empty if there is one seed."""
    seeds = max(len(group.entries) for group in groups)
    return f" Lines are means over {seeds} seeds, and bands their 95 % interval (Student's t)." if seeds > 1 else ""


def interval_words(groups: Sequence[SeedGroup]) -> str:
    """The meaning of ± in a table; empty if there is one seed."""
    return " ±: half of the 95 % interval over seeds." if max(len(g.entries) for g in groups) > 1 else ""


def curve_of(group: SeedGroup, measure: str = "mean") -> Series:
    return series(group.label, group.curve(measure), group.look)


def points_of(group: SeedGroup, measure: str, look: charts.ChooseLook) -> list[Series]:
    return [
        series(WORDS[point], group.curve(measure, point), look(i))
        for i, point in enumerate(group.run.measured)
        if all(run.curve(point, measure=measure) for run in group.runs)
    ]


def point_curves(group: SeedGroup, look: charts.ChooseLook) -> Markup:
    """All points of measurement of one training, and the table of its rounds."""
    about = "; ".join(f"{WORDS[point]}: {POINTS[point]}" for point in group.run.measured) + "."
    numbers = folded("Numbers of every round", round_table(group))
    shown = points_of(group, "mean", look)
    return curves(group.label, f"{about}{band_words([group])}", shown, group.run.metric, numbers)


def least(shown: Sequence[Series], runs: Sequence[StoredRun]) -> Markup:
    shown = [s for s in shown if s.points]
    if not shown:
        return join()
    counts = [len(scores) for run in runs for scores in run.last_scores.values() if scores]
    size = f" ({worst_tenth_text(counts)})" if counts else ""
    metric = runs[0].metric
    side = "lowest" if metric.higher else "highest"
    about = f"Mean {metric.words} of the 10 %{size} with the {side} {metric.words} in that round."
    return curves("The worst 10 % of clients", about, shown, metric)


def curves(name: str, about: str, shown: Sequence[Series], metric: MetricScale, *more: str) -> Markup:
    shown = [s for s in shown if s.points]
    if not shown:
        return join()
    unit = " percent" * metric.share
    ends = "; ".join(f"{s.name} ends at {metric.written(s.points[-1][1], 1)}{unit}" for s in shown)
    title, axis = f"{name}: {metric.words} over rounds", f"mean {metric.heading}"
    drawn = charts.lines(title, ends, shown, "round", axis, most=metric.most)
    return chart_figure(name, drawn, legend(shown, lambda v: metric.written(v, 1)), about, *more)


def round_table(group: SeedGroup) -> Markup:
    """One row per round; of several seeds, means and intervals over those that have the round."""
    runs, metric = group.runs, group.run.metric
    columns = {
        f"{WORDS[point]}{' (validation)' if split else ''}": dict(found)
        for split in ("", "validation_")
        for point in POINTS
        if (found := common([run.curve(point, split) for run in runs]))
    }
    rows, sent = [], 0.0
    for number in group.run.rounds:
        own = [run.rounds[number] for run in runs if number in run.rounds]
        up, down = (sum(row.get(key, 0.0) for row in own) / len(own) for key in ("bytes_up", "bytes_down"))
        sent += up + down
        seconds = sum(v for row in own for key, v in row.items() if key.startswith("seconds_")) / len(own)
        scores = [with_interval(found.get(number, ()), metric.written) for found in columns.values()]
        joined = f"{sum(row.get('participants', 0) for row in own) / len(own):.0f}"
        rows.append([str(number), joined, *scores, *(f"{v / 1e6:.3f}" for v in (up, down, sent)), f"{seconds:.2f}"])
    header = ["round", "clients", *columns, "MB up", "MB down", "MB so far", "seconds"]
    over = f", over {len(runs)} seeds" * (len(runs) > 1)
    title = f"{group.label}: mean {metric.words}{' in percent' * metric.share}{over}, traffic and time"
    return table(title, header, rows)
