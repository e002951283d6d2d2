"""Communication and time."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.analysis.looks import numbered
from coterie.report import charts, row_charts
from coterie.report.charts import ChartRow, Series
from coterie.report.elements import chart_figure, folded, grid, legend, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.seeds import SeedGroup, common, grouped, series, trained, with_interval
from coterie.runs.stored_run import StoredRun
from coterie.runs.tables import PHASES


def costs(runs: Sequence[StoredRun]) -> Markup:
    """Traffic and time; for a comparison, scores over megabytes, with the rest folded."""
    groups = grouped(runs)
    each = trained(groups)
    sending = [group for group in each if any(run.total("bytes_") for run in group.runs)]
    timed = [group for group in each if any(run.total("seconds_") for run in group.runs)]
    bought = scores_for_traffic(groups) if sending else join()
    sent = sent_so_far(sending) if sending else join()
    first = [part for part in (bought, times(timed) if timed else join()) if part]
    figures, behind = ([sent, *first] if sent else first, []) if len(each) == 1 else (first, [sent])
    tables = [megabytes(sending)] if sending else []
    tables += [seconds(timed)] if timed else []
    if not tables:
        return join()
    more = folded("Numbers: megabytes and seconds", *(grid([part]) for part in behind if part), *tables)
    return section("costs", "Communication and time", grid(figures), more)


def sent_so_far(found: Sequence[SeedGroup]) -> Markup:
    if len(found) == 1:
        sent = [series(way, sent_by(found[0], f"bytes_{way}"), numbered(i)) for i, way in enumerate(("up", "down"))]
    else:
        sent = [series(group.label, sent_by(group, "bytes_"), group.look) for group in found]
    about = "; ".join(f"{s.name}: {s.points[-1][1]:.1f} MB" for s in sent)
    drawn = charts.lines("Megabytes sent", about, sent, "round", "MB, cumulative")
    caption = "All clients together; up: to the server, down: to the clients."
    return chart_figure("Sent so far", drawn, legend(sent, lambda v: f"{v:.1f} MB"), caption)


def scores_for_traffic(groups: Sequence[SeedGroup]) -> Markup:
    """Scores over megabytes; empty if no method measured more than once what it sent."""
    bought = [line for group in groups if (line := against_bytes(group))]
    if not bought:
        return join()
    metric = groups[0].run.metric
    title, about = f"{metric.title} and megabytes", f"{metric.title} over megabytes sent"
    chart = charts.lines(title, about, bought, "MB sent", f"mean {metric.heading}", metric.most)
    last = legend(bought, lambda v: metric.written(v, 1))
    caption = f"{metric.title} over all data sent up to that round, up and down."
    return chart_figure(f"{metric.title} for traffic", chart, last, caption)


def megabytes(found: Sequence[SeedGroup]) -> Markup:
    ways = ("bytes_up", "bytes_down", "bytes_")
    rows = [
        [g.label, *(with_interval([run.total(way) / 1e6 for run in g.runs], lambda v: f"{v:.2f}") for way in ways)]
        for g in found
    ]
    return table("Sent, MB", ["method", "up", "down", "both"], rows)


def summed(run: StoredRun, start: str) -> list[tuple[float, float]]:
    """(round, cumulative MB)"""
    total, found = 0.0, []
    for number, row in run.rounds.items():
        total += sum(v for key, v in row.items() if key.startswith(start)) / 1e6
        found.append((float(number), total))
    return found


def sent_by(group: SeedGroup, start: str) -> list[tuple[float, list[float]]]:
    """(round, cumulative MB of each seed)"""
    return common([summed(run, start) for run in group.runs])


def against_bytes(group: SeedGroup) -> Series | None:
    """Scores over the mean megabytes of the seeds; None for a method that sends nothing."""
    sent = {number: sum(values) / len(values) for number, values in sent_by(group, "bytes_")}
    points = {round(sent[number], 4): values for number, values in group.curve() if number in sent}
    return series(group.label, sorted(points.items()), group.look) if len(points) > 1 else None


def spent(group: SeedGroup) -> list[float]:
    """Seconds of each phase, the mean over seeds."""
    return [sum(run.total(f"seconds_{phase}") for run in group.runs) / len(group.runs) for phase in PHASES]


def times(found: Sequence[SeedGroup]) -> Markup:
    """Seconds by phase; of several seeds, their means."""
    rows = [
        ChartRow(
            g.label, own, [f"{g.label}, {p}: {v:.1f} s ({v / sum(own):.0%})" for p, v in zip(PHASES, own, strict=True)]
        )
        for g in found
        for own in [spent(g)]
    ]
    about = "; ".join(f"{row.name}: {sum(row.values):.1f} s" for row in rows)
    drawn = row_charts.stacks("Seconds by phase", about, rows, PHASES, "seconds")
    over = ", mean over seeds" if any(len(g.entries) > 1 for g in found) else ""
    caption = f"Send, train, receive, evaluate and finish, from left to right, summed over rounds{over}."
    names = tag("ul", *(tag("li", charts.swatch(i), phase) for i, phase in enumerate(PHASES)), class_="legend")
    return chart_figure("Seconds by phase", drawn, names, caption)


def seconds(found: Sequence[SeedGroup]) -> Markup:
    rows = [[g.label, *(f"{v:.2f}" for v in (*spent(g), sum(spent(g))))] for g in found]
    return table("Seconds by phase", ["method", *PHASES, "all"], rows)
