"""The figure of a recipe, made from the results of its trainings: one SVG file that needs nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from coterie.core.errors import CoterieError
from coterie.federation.disk import whole
from coterie.recipes import ROUNDS, WEIGHTS, Recipe, Row, Value
from coterie.reports import charts
from coterie.reports.charts import LEVELS, Series
from coterie.reports.markup import Markup, tag
from coterie.reports.page import asset
from coterie.reproduce import Found
from coterie.results import origins, outcome, seeds

MARGIN, GAP, LINE = 20, 18, 20
LETTER = 7.2  # width of one, about
AXES = {  # what varies, in words; anything else by its name
    "noniid_s": "samples drawn from all classes alike, %",
    "local_size": "samples of a client",
    "num_clients": "clients",
    "epochs": "local epochs",
}
MADE_OF = "The shade of a cell says how much of the head of the column's client is in the head of the row's client"
Points = list[tuple[float, float]]


class Draw(Protocol):
    def __call__(self, *, x: float, y: float, width: float, height: float) -> Markup: ...


class Panel(NamedTuple):
    name: str
    draw: Draw
    about: str  # what it shows, in words


class Sheet(NamedTuple):
    panels: list[Panel]
    columns: int
    wide: float  # of a panel
    high: float
    key: list[tuple[int, str]]  # lines: look and name


def write_figure(recipe: Recipe, found: Found, folder: Path, rounds: int | None = None) -> Path | None:
    """Where it is now; None if there was nothing to draw. All of the file or nothing of it.

    rounds: other ones than the paper's, kept apart.
    """
    drawn = figure(recipe, found)
    if drawn is None:
        return None
    path = folder / f"{recipe.id}{'' if rounds is None else f'-{rounds}-rounds'}.svg"
    try:
        with whole(path) as part:
            part.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise CoterieError(f"{path} cannot be written: {error.strerror}") from None
    return path


def figure(recipe: Recipe, found: Found) -> str | None:
    """None if nothing was run, or if the recipe is that of a table."""
    if recipe.figure is None:
        return None
    found = of_shared_seeds(found, most=1 if recipe.figure == WEIGHTS else None)
    sheet = {ROUNDS: curves, WEIGHTS: weights}.get(recipe.figure, sweep)(recipe, found)
    contents = [content for by_seed in found.values() for content in by_seed.values()]
    return drawn(recipe, sheet, contents) if sheet.panels else None


def of_shared_seeds(found: Found, most: int | None) -> Found:
    """So that no point of a line is of other seeds than its neighbours. All seeds, if there are none that all have."""
    run = [by_seed.keys() for by_seed in found.values() if by_seed]
    shared = sorted(set.intersection(*map(set, run)))[:most] if run else []
    return {cell: {s: c for s, c in by_seed.items() if s in shared or not shared} for cell, by_seed in found.items()}


def curves(recipe: Recipe, found: Found) -> Sheet:
    """Accuracy over rounds; a panel for each value and measure."""
    panels = []
    for value, (measure, average) in product(recipe.values, recipe.averages.items()):
        points = [
            mean_curve(found[row.name, value].values(), recipe.point(row, measure), average) for row in recipe.rows
        ]
        panels += panel(recipe, named(recipe, value, measure), points, "round")
    return lines(recipe, found, panels)


def sweep(recipe: Recipe, found: Found) -> Sheet:
    """Accuracy over what varies; a panel for each measure, and for each choice of what else varies."""
    over, panels = str(recipe.figure), []
    others = dict.fromkeys(without(value, over) for value in recipe.values)
    for other, measure in product(others, recipe.measures):
        points = [swept(recipe, row, found, other, measure) for row in recipe.rows]
        panels += panel(recipe, named(recipe, other, measure), points, AXES.get(over, over))
    return lines(recipe, found, panels)


def swept(recipe: Recipe, row: Row, found: Found, other: Value, measure: str) -> Points:
    """Values of what varies, where all else is as in `other`, and the mean over seeds."""
    over, point, points = str(recipe.figure), recipe.point(row, measure), []
    for value in recipe.values:
        made = found[row.name, value].values() if without(value, over) == other else ()
        scores = [outcome(content, point, recipe.report, recipe.averages[measure]) for content in made]
        if own := [score for score in scores if score is not None]:
            points.append((float(dict(value)[over]), sum(own) / len(own)))
    return sorted(points)


def weights(recipe: Recipe, found: Found) -> Sheet:
    """Of whose heads every head is made: panels of a value beside each other, by round. One seed has to be enough."""
    panels = []
    for row, value in product(recipe.rows, recipe.values):
        kept = next(iter(found[row.name, value].values()), {}).get("records", {}).get(WEIGHTS, {})
        for at, matrix in kept.items():
            words = [row.name if len(recipe.rows) > 1 else "", named(recipe, value, ""), f"round {at}"]
            name = ", ".join(filter(None, words))
            shades = charts.shades(np.asarray(matrix, np.float64)).tolist()
            everyone = len(matrix) == recipe.plan(row, value).clients  # otherwise nobody knows who they are
            labels = [str(i) if everyone else "" for i in range(len(matrix))]
            draw = partial(charts.heat_map, name, MADE_OF, shades, labels)
            panels.append(Panel(name, draw, MADE_OF))
    return Sheet(panels, len(recipe.records[WEIGHTS]), 300, 312, [])


def named(recipe: Recipe, value: Value, measure: str) -> str:
    settings = [f"{name} {f'{v:.10g}' if isinstance(v, float) else v}" for name, v in value]
    return ", ".join([*settings, *([measure] if measure and len(recipe.measures) > 1 else [])])


def without(value: Value, name: str) -> Value:
    return tuple(pair for pair in value if pair[0] != name)


def mean_curve(contents: Iterable[dict[str, Any]], point: str, average: str) -> Points:
    """Over seeds, in percent. What is measured at the end only is one point."""
    own = [content["history"].get(point, {}) for content in contents]
    found = [{r: v for r, v in zip(h.get("round", ()), h.get(average, ()), strict=False) if v is not None} for h in own]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    return [(r, 100 * sum(curve[r] for curve in found) / len(found)) for r in shared]


def panel(recipe: Recipe, name: str, points: Sequence[Points], x_name: str) -> list[Panel]:
    """Points are those of each row. Nothing if there are none."""
    shown = [Series(row.name, points[look], look) for look, row in enumerate(recipe.rows) if points[look]]
    if not shown:
        return []
    about = "; ".join(f"{s.name} ends at {s.points[-1][1]:.1f} percent" for s in shown)
    draw = partial(charts.lines, name or recipe.place, about, shown, x_name, "accuracy, %", most=100, data_lines=None)
    return [Panel(name, draw, about)]


def lines(recipe: Recipe, found: Found, panels: list[Panel]) -> Sheet:
    run = {name for (name, _), by_seed in found.items() if by_seed}
    key = [(look, row.name) for look, row in enumerate(recipe.rows) if row.name in run]
    return Sheet(panels, min(2, len(panels)), charts.WIDTH, charts.HEIGHT, key)


def drawn(recipe: Recipe, sheet: Sheet, contents: Sequence[dict[str, Any]]) -> str:
    """Title, panels, what the lines are, and where the numbers come from."""
    wide = sheet.columns * (sheet.wide + GAP) - GAP
    above = LINE if any(shown.name for shown in sheet.panels) else 0
    title = f"{recipe.id}: {recipe.paper}, {recipe.place}"
    heading = fitting(title, wide)
    parts, top = [charts.text(MARGIN, MARGIN + 10, heading, "start", "strong")], float(MARGIN + 22)
    for first in range(0, len(sheet.panels), sheet.columns):
        for column, shown in enumerate(sheet.panels[first : first + sheet.columns]):
            left = MARGIN + column * (sheet.wide + GAP)
            parts.append(charts.text(left, top + above - 4, fitting(shown.name, sheet.wide), "start", "strong"))
            parts.append(shown.draw(x=left, y=top + above, width=sheet.wide, height=sheet.high))
        top += above + sheet.high + GAP
    more, top = legend(sheet.key, wide, top) if sheet.key else scale(top)
    parts += more
    top += GAP / 2
    for line in textwrap.wrap(told(recipe, contents), int(wide / LETTER)):
        top += LINE
        parts.append(charts.text(MARGIN, top, line, "start", "axis"))
    size = {"width": wide + 2 * MARGIN, "height": top + MARGIN}
    ground = tag("rect", **size, rx=8, style="fill: var(--card)")
    style = tag("style", Markup(asset("charts.css")))
    about = " ".join(f"{p.name}: {p.about}." if p.name else f"{p.about}." for p in sheet.panels)
    whole_svg = charts.svg(
        title, about, size["width"], size["height"], style, ground, *parts, **size, xmlns="http://www.w3.org/2000/svg"
    )
    return f"{whole_svg}\n"


def legend(key: Sequence[tuple[int, str]], wide: float, top: float) -> tuple[list[Markup], float]:
    """How each line looks, as many beside each other as fit; and where that ends."""
    parts, left, top = list[Markup](), float(MARGIN), top + LINE
    for look, name in key:
        name = fitting(name, wide - 46)
        width = 46 + LETTER * len(name) + GAP
        if left > MARGIN and left + width > MARGIN + wide:
            left, top = float(MARGIN), top + LINE
        parts += [charts.key(look, left, top - 11), charts.text(left + 42, top, name, "start")]
        left += width
    return parts, top


def scale(top: float) -> tuple[list[Markup], float]:
    """Which share a shade begins with, in percent."""
    parts = [charts.text(MARGIN, top + LINE, "percent, from", "start")]
    for level in range(LEVELS):
        left = MARGIN + 96 + 44 * level
        parts += [
            tag("rect", x=left, y=top + 9, width=16, height=14, class_=f"h{level}"),
            charts.text(left + 20, top + LINE, str(level**2), "start"),
        ]
    return parts, top + LINE


def fitting(words: str, wide: float) -> str:
    """As much of them as there is room for, bold ones too."""
    most = int(wide / (1.15 * LETTER))
    return words if len(words) <= most else f"{words[: most - 1]}…"


def told(recipe: Recipe, contents: Sequence[dict[str, Any]]) -> str:
    """Where the numbers come from."""
    kinds = {name: ", ".join(values) for name, values in origins(contents).items() if name != "partition"}
    words = [f"Recipe {recipe.id}", f"seed {seeds(contents)}", *(f"{name} {values}" for name, values in kinds.items())]
    reduced = sorted({content["rounds"] for content in contents if content.get("reduced")})
    words += [f"{', '.join(map(str, reduced))} rounds, not the paper's"] if reduced else []
    return f"{'; '.join(words)}."
