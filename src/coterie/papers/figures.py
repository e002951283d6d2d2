"""The figure of a recipe: one self-contained SVG file, and where matplotlib is installed PDF and PNG for papers."""

from __future__ import annotations

import importlib.util
import textwrap
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from coterie.analysis import plots
from coterie.analysis.looks import Look, looks
from coterie.core.errors import CoterieError
from coterie.core.printable import shortened
from coterie.papers.panels import ACCURACY, CurvePanel, HeatPanel, Panels, panels, provenance
from coterie.papers.recipes import Recipe
from coterie.papers.results import Found
from coterie.report import charts, heat_maps
from coterie.report.charts import Series
from coterie.report.heat_maps import LEVELS
from coterie.report.markup import Markup, tag
from coterie.report.page import chart_style
from coterie.runs.disk import whole

MARGIN, GAP, LINE = 20, 18, 20
LETTER = 7.2  # approximate width of a character
KEY_INCHES, LETTER_INCHES = 0.55, 0.07  # width of a legend entry for papers: line and gap, each character
LONGEST = 40  # characters of a name in such a legend
MADE_OF = "The shade of a cell is the weight of the column client's head in the row client's head"


class Draw(Protocol):
    def __call__(self, *, x: float, y: float, width: float, height: float) -> Markup: ...


class Panel(NamedTuple):
    name: str
    draw: Draw
    about: str  # text description


class Sheet(NamedTuple):
    panels: list[Panel]
    columns: int
    wide: float  # width of a panel
    high: float
    key: list[tuple[Look, str]]  # legend


def write_figures(recipe: Recipe, found: Found, folder: Path, rounds: int | None = None) -> list[Path]:
    """Write the SVG, and where matplotlib is installed PDF and PNG, each atomically; empty if nothing was run.

    rounds: if not the paper's; part of the file name.
    """
    text = figure(recipe, found)
    if text is None:
        return []
    path = folder / f"{recipe.id}{'' if rounds is None else f'-{rounds}-rounds'}.svg"
    try:
        with whole(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CoterieError(f"cannot write {path}: {error.strerror}") from None
    return [path, *(publish(recipe, found, path.with_suffix("")) if importlib.util.find_spec("matplotlib") else ())]


def figure(recipe: Recipe, found: Found) -> str | None:
    """SVG; None if nothing was run, or if the recipe is of a table."""
    made = panels(recipe, found)
    if not made.shown:
        return None
    return drawn(recipe, sheet(recipe, found, made), provenance(recipe, made.contents))


def sheet(recipe: Recipe, found: Found, made: Panels) -> Sheet:
    run = {name for (name, _), by_seed in found.items() if by_seed}
    styles = row_looks(recipe)
    key = [(look, name) for name, look in styles.items() if name in run]
    parts = [curve_panel(recipe, p, styles) if isinstance(p, CurvePanel) else heat_panel(p) for p in made.shown]
    if isinstance(made.shown[0], HeatPanel):
        return Sheet(parts, made.columns, 300, 312, [])
    return Sheet(parts, made.columns, charts.WIDTH, charts.HEIGHT, key)


def row_looks(recipe: Recipe) -> dict[str, Look]:
    """The look of each row: that of its method, or of its name where several rows train one method."""
    counts = Counter(row.method for row in recipe.rows)
    labels = {row.name: row.method if counts[row.method] == 1 else row.name for row in recipe.rows}
    found = looks(list(labels.values()))
    return {name: found[label] for name, label in labels.items()}


def curve_panel(recipe: Recipe, panel: CurvePanel, styles: dict[str, Look]) -> Panel:
    shown = [
        Series(c.name, [(x, sum(values) / len(values)) for x, values in c.points], styles[c.name]) for c in panel.curves
    ]
    percent = panel.y_name == ACCURACY
    ends = (f"{s.points[-1][1]:.1f} percent" if percent else f"{s.points[-1][1]:.2f}" for s in shown)
    about = "; ".join(f"{s.name} ends at {end}" for s, end in zip(shown, ends, strict=True))
    title = panel.name or recipe.place
    draw = partial(charts.lines, title, about, shown, panel.x_name, panel.y_name, most=100, data_lines=None)
    return Panel(panel.name, draw, about)


def heat_panel(panel: HeatPanel) -> Panel:
    shades = heat_maps.shades(np.asarray(panel.matrix, np.float64)).tolist()
    return Panel(panel.name, partial(heat_maps.heat_map, panel.name, MADE_OF, shades, panel.labels), MADE_OF)


def drawn(recipe: Recipe, sheet: Sheet, origin: str) -> str:
    """Title, panels, legend and provenance."""
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
    for line in textwrap.wrap(origin, int(wide / LETTER)):
        top += LINE
        parts.append(charts.text(MARGIN, top, line, "start", "axis"))
    size = {"width": wide + 2 * MARGIN, "height": top + MARGIN}
    ground = tag("rect", **size, rx=8, style="fill: var(--card)")
    style = tag("style", Markup(chart_style()))
    about = " ".join(f"{p.name}: {p.about}." if p.name else f"{p.about}." for p in sheet.panels)
    whole_svg = charts.svg(
        title, about, size["width"], size["height"], style, ground, *parts, **size, xmlns="http://www.w3.org/2000/svg"
    )
    return f"{whole_svg}\n"


def legend(key: Sequence[tuple[Look, str]], wide: float, top: float) -> tuple[list[Markup], float]:
    """The legend, as many entries per line as fit, and the y coordinate of its end."""
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
    """The smallest share of each shade, in percent."""
    parts = [charts.text(MARGIN, top + LINE, "percent, from", "start")]
    for level in range(LEVELS):
        left = MARGIN + 96 + 44 * level
        parts += [
            tag("rect", x=left, y=top + 9, width=16, height=14, class_=f"h{level}"),
            charts.text(left + 20, top + LINE, str(level**2), "start"),
        ]
    return parts, top + LINE


def fitting(words: str, wide: float) -> str:
    """Truncate to the available width, also for bold text."""
    return shortened(words, int(wide / (1.15 * LETTER)))


def publish(recipe: Recipe, found: Found, stem: Path, endings: tuple[str, ...] = (".pdf", ".png")) -> list[Path]:
    """Draw with matplotlib, with 95 % intervals over seeds, and write `stem` with each ending, atomically.

    Returns no paths if there is nothing to draw.
    """
    made = panels(recipe, found)
    if not made.shown:
        return []
    figure, axes = plots.new_figure(-(-len(made.shown) // made.columns), made.columns)
    for ax, panel in zip(axes, made.shown, strict=False):
        ax.set_title(panel.name)
        if isinstance(panel, CurvePanel):
            plots.curves(ax, panel.curves)
            ax.set_xlabel(panel.x_name)
            ax.set_ylabel(panel.y_name)
        else:
            plots.heat_map(ax, panel.matrix, panel.labels if any(panel.labels) else [])
    for ax in axes[len(made.shown) :]:
        ax.remove()
    legend = {
        label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }  # each method once
    if legend:
        names = [textwrap.shorten(name, LONGEST, placeholder="…") for name in legend]
        columns = max(int(figure.get_figwidth() / (KEY_INCHES + LETTER_INCHES * max(map(len, names)))), 1)
        figure.legend(
            list(legend.values()), names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
    paths = [stem.with_name(stem.name + ending) for ending in endings]
    title, origin = f"{recipe.paper}, {recipe.place}", provenance(recipe, made.contents)
    for path in paths:
        try:
            with whole(path) as part:
                plots.save(figure, part, title, origin, path.suffix.removeprefix("."))
        except OSError as error:
            raise CoterieError(f"cannot write {path}: {error.strerror}") from None
    return paths
