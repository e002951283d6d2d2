"""Pieces of a page: figures, tables, legends, folded numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.report.charts import Series, sample
from coterie.report.markup import Markup, join, tag

SHOWN = 400  # rows of a table; the run folder has all


def section(name: str, title: str, *content: str) -> Markup:
    return tag("section", tag("h2", title), *content, id=name)


def figure(caption: str, *content: str, class_: str | None = None) -> Markup:
    return tag("figure", *content, tag("figcaption", caption), class_=class_)


def chart_figure(name: str, drawn: Markup, key: Markup, caption: str, *more: str) -> Markup:
    """A chart with a heading, its legend and a caption."""
    return tag("figure", tag("h3", name), drawn, key, tag("figcaption", caption), *more)


def grid(figures: Sequence[Markup]) -> Markup:
    return tag("div", *figures, class_="grid")


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], words: bool = False) -> Markup:
    """The first column names the row. words: cells hold text, not numbers."""
    head = tag("tr", *(tag("th", name, scope="col") for name in header))
    lines = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows[:SHOWN]]
    more = f" The first {SHOWN} of {len(rows)} lines." if len(rows) > SHOWN else ""
    made = tag("table", tag("caption", tag("span", caption + more)), tag("thead", head), tag("tbody", *lines))
    return tag(
        "div", made, class_="wide words" if words else "wide", tabindex="0", role="region", aria_label=caption
    )  # scrollable areas must be reachable by keyboard


def folded(summary: str, *content: str) -> Markup:
    return tag("details", tag("summary", summary), *content)


def legend(series: Sequence[Series], written: Callable[[float], str] | None = None) -> Markup:
    """The look of each line, and its last value as it is written."""
    ends = [[tag("span", written(s.points[-1][1]), class_="last")] if written else [] for s in series]
    items = [tag("li", sample(s.look), tag("span", s.name), *end) for s, end in zip(series, ends, strict=True)]
    return tag("ul", *items, class_="legend")


def steps(labels: Sequence[str], class_: str) -> Markup:
    """A scale of shades with a number at each border."""
    items = [tag("li", tag("span", class_=f"{class_}{i}"), label) for i, label in enumerate(labels)]
    return tag("ul", *items, class_="steps", aria_hidden="true")


def listed(words: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def paragraph(*content: str, class_: str | None = None) -> Markup:
    return tag("p", join(*content), class_=class_)
