"""The data of a recipe's figure: panels of curves over rounds or settings, and of head weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from coterie.analysis.plots import PlotLine
from coterie.papers.recipes import ROUNDS, WEIGHTS, Recipe, RecipeRow, Value
from coterie.papers.results import Found, origins, outcome, seeds

AXES = {  # labels of x axes; default: the name of the setting
    "noniid_s": "samples drawn evenly from all classes, %",
    "local_size": "samples per client",
    "num_clients": "clients",
    "local_epochs": "local epochs",
}
ACCURACY = "accuracy, %"
Points = list[tuple[float, list[float]]]  # x, and the accuracy of each seed in percent


class CurvePanel(NamedTuple):
    name: str
    curves: list[PlotLine]
    x_name: str
    y_name: str


class HeatPanel(NamedTuple):
    """Row i, column j: the share of client j's head in the head of client i."""

    name: str
    matrix: list[list[float]]
    labels: list[str]


class Panels(NamedTuple):
    shown: Sequence[CurvePanel | HeatPanel]
    columns: int
    contents: list[dict[str, Any]]  # the results behind them


def panels(recipe: Recipe, found: Found) -> Panels:
    """Empty if nothing was run, or if the recipe is of a table."""
    if recipe.figure is None:
        return Panels([], 1, [])
    found = of_shared_seeds(found, most=1 if recipe.figure == WEIGHTS else None)
    contents = [content for by_seed in found.values() for content in by_seed.values()]
    if recipe.figure == WEIGHTS:
        return Panels(weights(recipe, found), len(recipe.records[WEIGHTS]), contents)
    shown = over_rounds(recipe, found) if recipe.figure == ROUNDS else over_setting(recipe, found)
    return Panels(shown, min(2, len(shown)), contents)


def of_shared_seeds(found: Found, most: int | None) -> Found:
    """Keep the seeds that all results have, so that lines compare the same seeds; keep all if they share none."""
    run = [by_seed.keys() for by_seed in found.values() if by_seed]
    shared = sorted(set.intersection(*map(set, run)))[:most] if run else []
    return {cell: {s: c for s, c in by_seed.items() if s in shared or not shared} for cell, by_seed in found.items()}


def over_rounds(recipe: Recipe, found: Found) -> list[CurvePanel]:
    """Accuracy over rounds; one panel per value and measure."""
    made = []
    for value, (measure, average) in product(recipe.values, recipe.averages.items()):
        points = [
            seed_curves(found[row.name, value].values(), recipe.point(row, measure), average) for row in recipe.rows
        ]
        made.append(curve_panel(recipe, named(recipe, value, measure), points, "round"))
    return [panel for panel in made if panel.curves]


def over_setting(recipe: Recipe, found: Found) -> list[CurvePanel]:
    """Accuracy over a setting; one panel per measure and choice of the other settings."""
    over, made = str(recipe.figure), []
    others = dict.fromkeys(without(value, over) for value in recipe.values)
    if recipe.joint:
        for other in others:
            points = [jointly(recipe, row, found, other) for row in recipe.rows]
            made.append(curve_panel(recipe, named(recipe, other, ""), points, AXES.get(over, over), joint_name(recipe)))
        return [panel for panel in made if panel.curves]
    for other, measure in product(others, recipe.measures):
        points = [swept(recipe, row, found, other, measure) for row in recipe.rows]
        made.append(curve_panel(recipe, named(recipe, other, measure), points, AXES.get(over, over)))
    return [panel for panel in made if panel.curves]


def swept(recipe: Recipe, row: RecipeRow, found: Found, other: Value, measure: str) -> Points:
    """Accuracy by value of the setting on the x axis, all other settings as in `other`."""
    over, point, points = str(recipe.figure), recipe.point(row, measure), []
    for value in recipe.values:
        made = found[row.name, value].values() if without(value, over) == other else ()
        scores = [outcome(content, point, recipe.report, recipe.averages[measure]) for content in made]
        if own := [score for score in scores if score is not None]:
            points.append((float(dict(value)[over]), own))
    return sorted(points)


def jointly(recipe: Recipe, row: RecipeRow, found: Found, other: Value) -> Points:
    """The sum of log(10 accuracy) over all measures, with accuracies in 0..1, by value of the setting on the x axis."""
    own = [dict(swept(recipe, row, found, other, measure)) for measure in recipe.measures]
    shared = sorted(set.intersection(*map(set, own)))
    return [
        (x, [math.fsum(math.log(10 * score / 100) for score in run) for run in zip(*(o[x] for o in own), strict=True)])
        for x in shared
    ]


def joint_name(recipe: Recipe) -> str:
    return " + ".join(f"log(10 {measure})" for measure in recipe.measures)


def weights(recipe: Recipe, found: Found) -> list[HeatPanel]:
    """Head weights of one seed; panels of one value next to each other, by round."""
    made = []
    for row, value in product(recipe.rows, recipe.values):
        kept = next(iter(found[row.name, value].values()), {}).get("records", {}).get(WEIGHTS, {})
        for at, matrix in kept.items():
            words = [row.name if len(recipe.rows) > 1 else "", named(recipe, value, ""), f"round {at}"]
            everyone = len(matrix) == recipe.plan(row, value).clients  # the results do not name participants
            order = sorted(range(len(matrix)), key=lambda i: (i % recipe.groups, i)) if everyone else range(len(matrix))
            labels = [str(i) if everyone else "" for i in order]
            ordered = [[matrix[i][j] for j in order] for i in order]  # members of a group next to each other
            made.append(HeatPanel(", ".join(filter(None, words)), ordered, labels))
    return made


def seed_curves(contents: Iterable[dict[str, Any]], point: str, average: str) -> Points:
    """Accuracies by round, for the rounds that all seeds have; one round for points that are measured at the end."""
    own = [content["history"].get(point, {}) for content in contents]
    found = [{r: v for r, v in zip(h.get("round", ()), h.get(average, ()), strict=False) if v is not None} for h in own]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    return [(r, [100 * curve[r] for curve in found]) for r in shared]


def curve_panel(recipe: Recipe, name: str, points: list[Points], x_name: str, y_name: str = ACCURACY) -> CurvePanel:
    """points: by row."""
    rows = zip(recipe.rows, points, strict=True)
    return CurvePanel(name, [PlotLine(row.name, own, row.method) for row, own in rows if own], x_name, y_name)


def named(recipe: Recipe, value: Value, measure: str) -> str:
    settings = [f"{name} {f'{v:.10g}' if isinstance(v, float) else v}" for name, v in value]
    return ", ".join([*settings, *([measure] if measure and len(recipe.measures) > 1 else [])])


def without(value: Value, name: str) -> Value:
    return tuple(pair for pair in value if pair[0] != name)


def provenance(recipe: Recipe, contents: list[dict[str, Any]]) -> str:
    """Recipe, seeds, commit, hardware and versions of the results."""
    kinds = {name: ", ".join(values) for name, values in origins(contents).items() if name != "partition"}
    words = [f"Recipe {recipe.id}", f"seed {seeds(contents)}", *(f"{name} {values}" for name, values in kinds.items())]
    reduced = sorted({content["rounds"] for content in contents if content.get("reduced")})
    words += [f"{', '.join(map(str, reduced))} rounds, not the paper's"] if reduced else []
    return f"{'; '.join(words)}.".encode(errors="replace").decode()  # a file may hold half of a surrogate pair
