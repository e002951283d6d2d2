"""Charts as SVG: pure functions from numbers to markup. charts.css has their style, looks.py the colors of lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from coterie.analysis.looks import COLORS, Look
from coterie.core.metric_scale import MetricScale
from coterie.report.markup import Markup, join, number, tag

WIDTH, HEIGHT = 520, 304
LEFT, RIGHT, TOP, BOTTOM = 48, 500, 30, 256  # of the plot area

ChooseLook = Callable[[int], Look]  # of the lines of a chart, by their number


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]  # x ascending
    look: Look  # a method looks the same in all charts
    halves: Sequence[float | None] = ()  # half of the interval at each point; empty or None: there is none

    @property
    def edges(self) -> list[tuple[float, float, float]]:
        """(x, low, high) of the band; empty without one."""
        found = zip(self.points, self.halves, strict=True) if self.halves else ()
        return [(x, y - half, y + half) for (x, y), half in found if half is not None]


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
    color: int = 0  # of COLORS, where rows are methods
    half: float | None = None  # half of the interval of the mean


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


def style(css: str) -> str:
    """charts.css with the colors of lines in its light and its dark part."""
    parts = {name: "".join(f" --s{i}: {getattr(c, name)};" for i, c in enumerate(COLORS)) for name in ("light", "dark")}
    classes = "".join(f".s{i} {{ color: var(--s{i}); }} " for i in range(len(COLORS)))
    for name, text in {**parts, "classes": classes}.items():
        css = css.replace(f"/* {name} series */", text.strip())
    return css


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
    values = [v for s in series for _, v in s.points]
    y = Axis(*around([*values, *near([v for s in series for edge in s.edges for v in edge[1:]], values, most)],
                     most=most), BOTTOM, TOP)  # fmt: skip
    whole = all(v % 1 == 0 for v in xs)  # rounds have no fractions
    marks = [v for v in ticks(low, high, 8) if v % 1 == 0 or not whole]
    bands = [_band(s.look, s.edges, x, y) for s in series if s.edges]
    drawn = [_line(s.look, [(x(a), y(b)) for a, b in s.points]) for s in series]
    read = {"x": xs, "series": [_read(s, xs) for s in series], "axes": [x, y], "x_name": x_name, "y_name": y_name}
    content = (frame(x, y, x_name, y_name, marks), *bands, *drawn)
    attributes = {"data_lines": json.dumps(read, separators=(",", ":")), **more}
    return svg(title, about, WIDTH, HEIGHT, *content, class_="chart", **attributes)


def near(edges: Sequence[float], values: Sequence[float], most: float) -> list[float]:
    """Edges of bands for the range of an axis: bands of few seeds may be so wide that they would flatten the lines."""
    low, high = min(values), max(values)
    room = max(high - low, 1e-9)
    least = 0.0 if math.isfinite(most) else -math.inf
    return [min(max(edge, low - room, min(least, low)), high + room, max(most, high)) for edge in edges]


def _read(s: Series, xs: Sequence[float]) -> list[object]:
    """Name and values of a line for report.js; with a band, half of the interval too."""
    values = {x: float(f"{y:.6g}") for x, y in s.points}
    halves = {x: float(f"{(high - low) / 2:.6g}") for x, low, high in s.edges}
    return [s.name, [values.get(x) for x in xs], *([[halves.get(x) for x in xs]] if halves else [])]


def _band(look: Look, edges: Sequence[tuple[float, float, float]], x: Axis, y: Axis) -> Markup:
    """The area between the edges, cut at the ends of the axis."""
    upper = [f"{number(x(a), 1)} {number(y(min(high, y.high)), 1)}" for a, _, high in edges]
    lower = [f"{number(x(a), 1)} {number(y(max(low, y.low)), 1)}" for a, low, _ in reversed(edges)]
    return tag("path", d=f"M{'L'.join([*upper, *lower])}z", class_=f"band s{look.color}")


def _line(look: Look, points: Sequence[tuple[float, float]]) -> Markup:
    path = "M" + "L".join(f"{number(a, 1)} {number(b, 1)}" for a, b in points)
    every = max(1, len(points) // 7)
    marked = [points[k] for k in range(min(look.marker % every, len(points) - 1), len(points), every)]
    marks = "".join(mark(look, a, b) for a, b in marked)
    drawn = (tag("path", d=path, class_="line"), tag("path", d=marks, class_="mark"))
    return tag("g", *drawn, class_=classes(look))


def classes(look: Look) -> str:
    """The CSS classes of a look."""
    return f"s{look.color} d{look.dashes}"


def mark(look: Look, x: float, y: float) -> str:
    """Circle, square, diamond, triangle, inverted triangle, plus, star or cross, as part of a path."""
    shape = (
        "m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",
        "m-3.3-3.3h6.6v6.6h-6.6z",
        "m0-4.7l4.7 4.7l-4.7 4.7l-4.7-4.7z",
        "m0-4.2l4 7h-8z",
        "m0 4.2l4-7h-8z",
        "m-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
        "m0-5l1.3 3.7h3.9l-3.1 2.4l1.1 3.8l-3.2-2.3l-3.2 2.3l1.1-3.8l-3.1-2.4h3.9z",
        "m-4.2-2.2l2-2l2.2 2.2l2.2-2.2l2 2l-2.2 2.2l2.2 2.2l-2 2l-2.2-2.2l-2.2 2.2l-2-2l2.2-2.2z",
    )[look.marker]
    return f"M{number(x, 1)} {number(y, 1)}{shape}"


def key(look: Look, x: float = 0, y: float = 0) -> Markup:
    """A look in a legend, 34 wide and 14 high."""
    line = f"M{number(x + 1)} {number(y + 7)}h32"
    drawn = (tag("path", d=line, class_="line"), tag("path", d=mark(look, x + 17, y + 7), class_="mark"))
    return tag("g", *drawn, class_=classes(look))


def sample(look: Look) -> Markup:
    """A look, for a legend."""
    return tag("svg", key(look), viewBox="0 0 34 14", class_="sample", aria_hidden="true")


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
