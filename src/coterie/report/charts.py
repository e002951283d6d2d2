"""Charts as SVG: pure functions from numbers to markup. charts.css has the colors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.metric_scale import MetricScale
from coterie.report.markup import Markup, join, number, tag

WIDTH, HEIGHT = 520, 304
LEFT, RIGHT, TOP, BOTTOM = 48, 500, 30, 256  # of the plot area
COLORS, DASHES = 7, 5  # CSS classes s0 ... s6 and d0 ... d4
LEVELS = 10  # shades of a heat map


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]  # x ascending
    look: int  # color, dashes and marks; a run looks the same in all charts


class Axis(NamedTuple):
    """Maps values from `low`..`high` to coordinates `start`..`end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class ChartRow(NamedTuple):
    """One row of a chart with names on the left."""

    name: str
    values: Sequence[float]
    tips: Sequence[str]


def step(span: float, about: int = 5) -> float:
    """1, 2 or 5 times a power of ten, so that `span` has at most `about` steps."""
    least = span / about
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * k for k in (1, 2, 5, 10) if power * k >= least * (1 - 1e-9))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    size = step(high - low, about)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(k * size, 12) for k in range(first, last + 1)]


def around(values: Sequence[float], least: float = 0.0, most: float = math.inf) -> tuple[float, float]:
    """The smallest range of round numbers that holds all values."""
    low, high = min(values), max(values)
    least, most = min(least, low), max(most, high)
    if low == high:
        low, high = max(least, low - 1), min(most, high + 1)
    size = 0.0
    while size != (size := step(high - low)):  # a wider range may need larger steps
        low, high = math.floor(low / size + 1e-9) * size, math.ceil(high / size - 1e-9) * size
    return max(least, low), min(most, high)


def svg(title: str, about: str, wide: float, high: float, *content: str, **more: str | float | None) -> Markup:
    box = f"0 0 {number(wide)} {number(high)}"
    return tag("svg", tag("title", title), tag("desc", about), *content, viewBox=box, role="img", **more)


def text(x: float, y: float, content: str, anchor: str = "middle", class_: str | None = None) -> Markup:
    return tag("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def frame(x: Axis, y: Axis, x_name: str, y_name: str, marks: Sequence[float]) -> Markup:
    """Grid, ticks and names of the axes; `marks` are the ticks of x."""
    level = [
        join(
            tag("line", x1=LEFT, x2=RIGHT, y1=y(v), y2=y(v), class_="rule"),
            text(LEFT - 7, y(v) + 4.5, f"{v:.10g}", "end"),
        )
        for v in ticks(y.low, y.high)
    ]
    below = [text(x(v), BOTTOM + 19, f"{v:.10g}") for v in marks]
    names = (text(4, 15, y_name, "start", "axis"), text((LEFT + RIGHT) / 2, HEIGHT - 8, x_name, class_="axis"))
    return join(*level, *below, *names)


def lines(
    title: str,
    about: str,
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    most: float = math.inf,
    **more: float | None,
) -> Markup:
    """One line per series, with its own color, dashes and marks. most: the largest possible y."""
    xs = sorted({x for s in series for x, _ in s.points})
    low, high = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
    x = Axis(low, high, LEFT, RIGHT)
    y = Axis(*around([v for s in series for _, v in s.points], most=most), BOTTOM, TOP)
    whole = all(v % 1 == 0 for v in xs)  # rounds have no fractions
    marks = [v for v in ticks(low, high, 8) if v % 1 == 0 or not whole]
    drawn = [_line(s.look, [(x(a), y(b)) for a, b in s.points]) for s in series]
    values = [
        [s.name, [float(f"{own[v]:.6g}") if v in own else None for v in xs]] for s in series for own in [dict(s.points)]
    ]
    read = {"x": xs, "series": values, "axes": [x, y], "x_name": x_name, "y_name": y_name}
    content = (frame(x, y, x_name, y_name, marks), *drawn)
    attributes = {"data_lines": json.dumps(read, separators=(",", ":")), **more}
    return svg(title, about, WIDTH, HEIGHT, *content, class_="chart", **attributes)


def _line(i: int, points: Sequence[tuple[float, float]]) -> Markup:
    path = "M" + "L".join(f"{number(a, 1)} {number(b, 1)}" for a, b in points)
    every = max(1, len(points) // 7)
    marked = [points[k] for k in range(min(i % every, len(points) - 1), len(points), every)]
    marks = "".join(mark(i, a, b) for a, b in marked)
    drawn = (tag("path", d=path, class_="line"), tag("path", d=marks, class_="mark"))
    return tag("g", *drawn, class_=look(i))


def look(i: int) -> str:
    """The CSS classes of the i-th look."""
    return f"s{i % COLORS} d{i % DASHES}"


def mark(i: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond, cross or inverted triangle, as part of a path."""
    shape = (
        "m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",
        "m-3.3-3.3h6.6v6.6h-6.6z",
        "m0-4.2l4 7h-8z",
        "m0-4.7l4.7 4.7l-4.7 4.7l-4.7-4.7z",
        "m-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
        "m0 4.2l4-7h-8z",
    )[i % 6]
    return f"M{number(x, 1)} {number(y, 1)}{shape}"


def key(i: int, x: float = 0, y: float = 0) -> Markup:
    """The i-th look, 34 wide and 14 high."""
    line = f"M{number(x + 1)} {number(y + 7)}h32"
    drawn = (tag("path", d=line, class_="line"), tag("path", d=mark(i, x + 17, y + 7), class_="mark"))
    return tag("g", *drawn, class_=look(i))


def sample(i: int) -> Markup:
    """The i-th look, for a legend."""
    return tag("svg", key(i), viewBox="0 0 34 14", class_="sample", aria_hidden="true")


def swatch(i: int) -> Markup:
    """The i-th part of a stack, for a legend."""
    drawn = tag("rect", width=14, height=14, class_=f"p{i}")
    return tag("svg", drawn, viewBox="0 0 14 14", class_="swatch", aria_hidden="true")


def bars(title: str, about: str, row: ChartRow, x_name: str, metric: MetricScale, dark: int, line: float) -> Markup:
    """One bar per value, in the given order. dark: how many at the start are highlighted. line: the mean."""
    x = Axis(0, len(row.values), LEFT, RIGHT)
    low, high = (0.0, 100.0) if metric.share else around([0, *row.values])
    y, wide = Axis(low, high, BOTTOM, TOP), x(1) - x(0)
    gap = min(2.0, wide / 5)
    drawn = [
        tag(
            "rect", x=x(i) + gap / 2, y=min(y(v), y(0)), width=wide - gap, height=abs(y(0) - y(v)), data_tip=tip,
            class_="low" if i < dark else "bar",
        )
        for i, (v, tip) in enumerate(zip(row.values, row.tips, strict=True))
    ]  # fmt: skip
    side, anchor = (LEFT + 4, "start") if metric.higher else (RIGHT - 4, "end")  # above the smallest bars
    mean = (
        tag("line", x1=LEFT, x2=RIGHT, y1=y(line), y2=y(line), class_="mean"),
        text(side, y(line) - 6, f"mean {metric.written(line, 1)}", anchor, "strong"),
    )
    return svg(title, about, WIDTH, HEIGHT, frame(x, y, x_name, metric.heading, []), *drawn, *mean, class_="chart")


def strips(title: str, about: str, rows: Sequence[ChartRow], x_name: str, metric: MetricScale) -> Markup:
    """One strip per row: a stroke for each value, a diamond at the mean."""
    x = Axis(*around([v for row in rows for v in row.values], most=metric.most), 8, WIDTH - 10)
    high, bottom = 50, 50 * len(rows) + 6
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
        tag("rect", x=x(v) - 1.5, y=top + 24, width=3, height=18, class_="stroke", data_tip=tip)
        for v, tip in zip(row.values, row.tips, strict=True)
    ]
    diamond = f"M{number(x(mean))} {number(top + 20)}l6 13l-6 13l-6-13z"
    return join(
        text(10, top + 15, row.name, "start", "strong"),
        text(WIDTH - 12, top + 15, f"mean {metric.written(mean, 1)}", "end"),
        *strokes,
        tag("path", d=diamond, class_="diamond", data_tip=f"{row.name}: mean {metric.written(mean)}"),
    )


def stacks(title: str, about: str, rows: Sequence[ChartRow], parts: Sequence[str], x_name: str) -> Markup:
    """One bar per row, made of parts that are labeled where there is room."""
    x = Axis(0, max(sum(row.values) for row in rows) or 1.0, 8, WIDTH - 10)
    high = 52
    bottom = high * len(rows) + 4
    grid = [text(x(v), bottom + 18, number(v)) for v in ticks(0, x.high, 6)]
    drawn = [_stack(x, high * i + 4, row, parts) for i, row in enumerate(rows)]
    name = text(WIDTH / 2, bottom + 40, x_name, class_="axis")
    return svg(title, about, WIDTH, bottom + 48, *grid, *drawn, name, class_="chart")


def _stack(x: Axis, top: float, row: ChartRow, parts: Sequence[str]) -> Markup:
    drawn, done = [text(10, top + 15, row.name, "start", "strong")], 0.0
    for i, (part, value, tip) in enumerate(zip(parts, row.values, row.tips, strict=True)):
        start, end = x(done), x(done + value)
        done += value
        width = max(0.0, end - start - 1)
        drawn.append(tag("rect", x=start, y=top + 21, width=width, height=24, class_=f"part p{i}", data_tip=tip))
        if width > 11 * len(part):
            drawn.append(text((start + end) / 2, top + 38, part, class_=f"on p{i}"))
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


def shades(shares: NDArray[np.float64]) -> NDArray[np.uint8]:
    """0..255 for 0..1, by the square root, so that small shares are visible."""
    return np.round(255 * np.sqrt(np.clip(shares, 0, 1))).astype(np.uint8)


def heat_paths(rows: Sequence[Sequence[int]]) -> list[str]:
    """One path per level, with its cells as unit squares; equal neighbors are merged.

    Zero cells have no level. report.js does the same when the round changes.
    """
    paths = [""] * LEVELS
    for i, row in enumerate(rows):
        levels = [value * LEVELS >> 8 if value else -1 for value in row]
        start = 0
        for j in range(1, len(row) + 1):
            if j == len(row) or levels[j] != levels[start]:
                if levels[start] >= 0:
                    paths[levels[start]] += f"M{start} {i}h{j - start}v1h-{j - start}z"
                start = j
    return paths


def heat_map(
    title: str, about: str, rows: Sequence[Sequence[int]], labels: Sequence[str], **more: float | None
) -> Markup:
    """A heat map of shades (S, S), one row per client."""
    size, left, top = 400, 52, 46
    cell = size / len(rows)
    every = -(-34 // cell) if len(rows) > 12 else 1
    named = [(i, label) for i, label in enumerate(labels) if i % every == 0]
    across = [text(left + (i + 0.5) * cell, top - 6, label) for i, label in named]
    down = [text(left - 6, top + (i + 0.5) * cell + 4.5, label, "end") for i, label in named]
    paths = [tag("path", d=d, class_=f"h{level}") for level, d in enumerate(heat_paths(rows))]
    cells = tag("g", *paths, class_="cells", transform=f"translate({left} {top}) scale({number(cell, 5)})")
    ground = tag("rect", x=left, y=top, width=size, height=size, class_="ground")
    names = (
        text(left + size / 2, top + size + 22, "weights of the heads of these clients", class_="axis"),
        text(4, 18, "in the head of client", "start", "axis"),
    )
    labelled = tag("g", *across, *down, class_="labels")
    content = (ground, cells, labelled, *names)
    return svg(title, about, left + size + 6, top + size + 30, *content, class_="chart heat", **more)
