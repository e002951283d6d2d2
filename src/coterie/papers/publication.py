"""The figure of a recipe for publication: PDF and PNG by matplotlib, with 95 % intervals over seeds."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

from coterie.analysis import plots
from coterie.core.errors import CoterieError
from coterie.papers.panels import CurvePanel, panels, provenance
from coterie.papers.recipes import Recipe
from coterie.papers.results import Found
from coterie.runs.disk import whole

KEY, LETTER = 0.55, 0.07  # width of a legend entry in inches: line and gap, each character
LONGEST = 40  # characters of a name


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def publish(recipe: Recipe, found: Found, stem: Path, endings: tuple[str, ...] = (".pdf", ".png")) -> list[Path]:
    """Write `stem` with each ending, atomically; returns no paths if there is nothing to draw."""
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
        columns = max(int(figure.get_figwidth() / (KEY + LETTER * max(map(len, names)))), 1)
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
