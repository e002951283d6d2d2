"""Communication and time."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.report import charts
from coterie.report.charts import ChartRow, Series
from coterie.report.elements import figure, grid, legend, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import Reported, entries, named
from coterie.runs.run import Run
from coterie.runs.tables import PHASES


def communication(runs: Sequence[Run]) -> Markup:
    """Megabytes sent, and scores over megabytes."""
    found = [own for own in named(runs) if own.run.total("bytes_")]
    if not found:
        return join()
    if len(found) == 1:
        series = [Series(way, summed(found[0].run, f"bytes_{way}"), i) for i, way in enumerate(("up", "down"))]
    else:
        series = [Series(name, summed(run, "bytes_"), look) for run, name, look in found]
    about = "; ".join(f"{s.name}: {s.points[-1][1]:.1f} MB" for s in series)
    sent = charts.lines("Megabytes sent", about, series, "round", "MB, cumulative")
    figures = [tag("figure", tag("h3", "Sent so far"), sent, legend(series),
                   tag("figcaption", "All clients together; up: to the server, down: to the clients."))]  # fmt: skip
    bought = [Series(e.name, points, e.look) for e in entries(runs) if (points := against_bytes(e))]
    if bought:
        metric = runs[0].metric
        title, about = f"{metric.title} and megabytes", f"{metric.title} over megabytes sent"
        chart = charts.lines(title, about, bought, "MB sent", f"mean {metric.heading}", metric.most)
        caption = f"{metric.title} over all data sent up to that round."
        figures.append(
            tag(
                "figure",
                tag("h3", f"{metric.title} for traffic"),
                chart,
                legend(bought, metric),
                tag("figcaption", caption),
            )
        )
    rows = [
        [name, *(f"{v / 1e6:.2f}" for v in (run.total("bytes_up"), run.total("bytes_down"), run.total("bytes_")))]
        for run, name, _ in found
    ]
    return section("traffic", "Communication", grid(figures), table("Sent, MB", ["run", "up", "down", "both"], rows))


def summed(run: Run, start: str) -> list[tuple[float, float]]:
    """(round, cumulative MB)"""
    total, found = 0.0, []
    for number, row in run.rounds.items():
        total += sum(v for key, v in row.items() if key.startswith(start)) / 1e6
        found.append((float(number), total))
    return found


def against_bytes(entry: Reported) -> list[tuple[float, float]]:
    sent = dict(summed(entry.run, "bytes_"))
    points = {round(sent[number], 4): value for number, value in entry.run.curve(entry.point)}
    return sorted(points.items()) if len(points) > 1 else []


def times(runs: Sequence[Run]) -> Markup:
    spent = [
        (name, [run.total(f"seconds_{phase}") for phase in PHASES])
        for run, name, _ in named(runs)
        if run.total("seconds_")
    ]
    if not spent:
        return join()
    rows = [
        ChartRow(name, own, [f"{name}, {p}: {v:.1f} s ({v / sum(own):.0%})" for p, v in zip(PHASES, own, strict=True)])
        for name, own in spent
    ]
    about = "; ".join(f"{row.name}: {sum(row.values):.1f} s" for row in rows)
    drawn = charts.stacks("Seconds by phase", about, rows, PHASES, "seconds")
    numbers = [[name, *(f"{v:.2f}" for v in (*own, sum(own)))] for name, own in spent]
    caption = "Send, train, receive, evaluate and finish, from left to right, summed over rounds."
    names = tag("ul", *(tag("li", charts.swatch(i), phase) for i, phase in enumerate(PHASES)), class_="legend")
    figures = figure(caption, drawn, names, class_="strips")
    return section("time", "Time", figures, table("Seconds by phase", ["run", *PHASES, "all"], numbers))
