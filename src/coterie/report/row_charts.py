"""Charts with one row per method or client: strips of scores, stacks of parts, small histograms."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core.metric_scale import MetricScale
from coterie.report.charts import WIDTH, Axis, ChartRow, around, svg, text, ticks
from coterie.report.markup import Markup, join, number, tag


def strips(title: str, about: str, rows: Sequence[ChartRow], x_name: str, metric: MetricScale) -> Markup:
    """One strip per row: a stroke for each value, a diamond at the mean."""
    x = Axis(*around([v for row in rows for v in row.values], most=metric.most), 8, WIDTH - 10)
    high, bottom = 46, 46 * len(rows) + 6
    grid = [
        join(
            tag("line", x1=x(v), x2=x(v), y1=6, y2=bottom, class_="rule"), text(x(v), bottom + 18, number(v))
        )
        for v in ticks(x.low, x.high, 8)
    ]  # fmt: skip
    drawn = [_strip(x, high * i + 6, row, metric) for i, row in enumerate(rows)]
    name = text(WIDTH / 2, bottom + 40, x_name, class_="axis")
    return svg(title, about, WIDTH, bottom + 48, *grid, *drawn, name, class_="chart")


def _strip(x: Axis, top: float, row: ChartRow, metric: MetricScale) -> Markup:
    mean = sum(row.values) / len(row.values)
    strokes = [
        tag("rect", x=x(v) - 1.5, y=top + 22, width=3, height=18, class_=f"stroke s{row.color}", data_tip=tip)
        for v, tip in zip(row.values, row.tips, strict=True)
    ]
    diamond = f"M{number(x(mean))} {number(top + 18)}l6 13l-6 13l-6-13z"
    interval = "" if row.half is None else f" ± {metric.written(row.half, 1)}"
    return join(
        text(10, top + 13, row.name, "start", "strong"),
        text(WIDTH - 12, top + 13, f"mean {metric.written(mean, 1)}{interval}", "end"),
        *strokes,
        tag("path", d=diamond, class_="diamond", data_tip=f"{row.name}: mean {metric.written(mean)}{interval}"),
    )


def stacks(title: str, about: str, rows: Sequence[ChartRow], parts: Sequence[str], x_name: str) -> Markup:
    """One bar per row, made of parts that are labeled where there is room."""
    x = Axis(0, max(sum(row.values) for row in rows) or 1.0, 8, WIDTH - 10)
    high = 46
    bottom = high * len(rows) + 4
    grid = [text(x(v), bottom + 18, number(v)) for v in ticks(0, x.high, 6)]
    drawn = [_stack(x, high * i + 4, row, parts) for i, row in enumerate(rows)]
    name = text(WIDTH / 2, bottom + 40, x_name, class_="axis")
    return svg(title, about, WIDTH, bottom + 48, *grid, *drawn, name, class_="chart")


def _stack(x: Axis, top: float, row: ChartRow, parts: Sequence[str]) -> Markup:
    drawn, done = [text(10, top + 13, row.name, "start", "strong")], 0.0
    for i, (part, value, tip) in enumerate(zip(parts, row.values, row.tips, strict=True)):
        start, end = x(done), x(done + value)
        done += value
        width = max(0.0, end - start - 1)
        drawn.append(tag("rect", x=start, y=top + 19, width=width, height=22, class_=f"part p{i}", data_tip=tip))
        if width > 11 * len(part):
            drawn.append(text((start + end) / 2, top + 35, part, class_=f"on p{i}"))
    return join(*drawn)


def histogram(title: str, counts: Sequence[int], highest: int, after: Sequence[int] | None = None) -> Markup:
    """Small bars next to each other; `after` is drawn over them as an outline."""
    wide, high = 120, 56
    x, y = Axis(0, len(counts), 0, wide), Axis(0, highest or 1, high, 2)
    filled = "".join(
        f"M{number(x(i) + 0.5)} {high}V{number(y(n))}H{number(x(i + 1) - 0.5)}V{high}z"
        for i, n in enumerate(counts)
        if n
    )
    outline = "" if after is None else f"M0 {high}" + "".join(
        f"V{number(y(n))}H{number(x(i + 1))}" for i, n in enumerate(after)
    ) + f"V{high}"  # fmt: skip
    drawn = [tag("path", d=filled, class_="bar"), tag("path", d=f"M0 {high}H{wide}", class_="base")]
    about = ", ".join(map(str, counts))
    return svg(title, about, wide, high + 1, *drawn, tag("path", d=outline, class_="after"), class_="histogram")
