"""One section per recipe with results: provenance, and the published numbers next to ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from coterie.analysis.significance import Spread
from coterie.analysis.tables import TextTable, markdown
from coterie.papers.recipes import Plan, Recipe, RecipeRow, Value
from coterie.papers.results import origins, outcome, seconds_alone, seeds
from coterie.papers.tables import compared, published_text
from coterie.papers.verdicts import Reproduced
from tools.ledger.files import Files, Reading

PICTURES = "pictures"  # next to the page
POINTS = {"before": "pre", "after": "post", "global": "global"}  # additional columns: name -> point


class Cell(NamedTuple):
    """One number of a recipe, with all its trainings."""

    recipe: Recipe
    row: RecipeRow
    value: Value
    measure: str
    readings: list[Reading]
    plan: Plan
    comparison: Reproduced

    def scores(self, point: str | None = None, report: str | None = None) -> list[float]:
        """By seed. point, report: default to those of the table."""
        average, report = self.recipe.averages[self.measure], report or self.recipe.report
        found = [outcome(r.content, point or r.point, report, average) for r in self.readings]
        return [s for s in found if s is not None]

    def mean(self, point: str | None = None, report: str | None = None) -> float | None:
        scores = self.scores(point, report)
        return Spread.of(scores).mean if scores else None


def cells(files: Files, recipe: Recipe) -> list[Cell]:
    """All numbers of a recipe, also those that were not run."""
    if recipe.id not in files.cells:
        files.cells[recipe.id] = [
            made(files, recipe, row, value, measure)
            for row in recipe.rows
            for value in recipe.values
            for measure in recipe.measures
        ]
    return list(files.cells[recipe.id])


def made(files: Files, recipe: Recipe, row: RecipeRow, value: Value, measure: str) -> Cell:
    plan, readings = files.plan(recipe, row, value), files.readings(recipe, row, value, measure)
    points = {
        reading.point for reading in readings if reading.content.get("early")
    }  # early files have their own points
    read = replace(row, read=points.pop()) if points else row
    contents = [reading.content for reading in readings]
    found = compared(recipe, read, value, measure, plan, contents, files.noises)
    return Cell(recipe, row, value, measure, readings, plan, found)


def contents(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    return [reading.content for cell in cells for reading in cell.readings]


def ours_text(cell: Cell) -> str:
    """The mean, and half of its 95 % interval if there is one."""
    ours = cell.comparison.ours
    if ours is None:
        return "-"
    return f"{ours.mean:.2f}" + (f" ± {ours.half:.2f}" if ours.half is not None else "")


def section(files: Files, recipe: Recipe, notes: Mapping[str, str]) -> str:
    """Heading, provenance and table; empty if nothing was run. notes: by dataset."""
    every = cells(files, recipe)
    if not (made := [cell for cell in every if cell.comparison.ours]):
        return ""
    found = origins(contents(made))
    differ = [name for name, values in found.items() if len(values) > 1 and name != "partition"]
    lines = [dict(columns(cell, differ)) for cell in made]
    shown = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
    table = TextTable("", shown, [[line[name] for name in shown] for line in lines])
    same = ", ".join(f"{name} {values[0]}" for name, values in found.items() if len(values) == 1)
    parts = [
        f"## {title(recipe)}",
        f"{about(recipe, made)} {same}.{not_run(every, made)}",
        *picture(files, recipe),
        markdown(table).strip().split("\n", 2)[2],  # without its title
        *(notes[dataset] for dataset in recipe.datasets if dataset in notes),
    ]
    return "\n\n".join(parts)


def title(recipe: Recipe) -> str:
    return f"{recipe.id}: {recipe.paper}, {recipe.place}"


def picture(files: Files, recipe: Recipe) -> list[str]:
    """The figure as a Markdown image, if there is one."""
    words = f"{recipe.paper}, {recipe.place}, reproduced"
    return [f"![{words}]({PICTURES}/{recipe.id}.svg)"] if files.picture(recipe) else []


def about(recipe: Recipe, made: list[Cell]) -> str:
    plans = [cell.plan for cell in made]

    def all_of(name: str, values: Iterable[Any]) -> str:
        return f"{', '.join(map(str, sorted(set(values))))} {name}"

    trained = [all_of("clients", (p.clients for p in plans)), all_of("rounds", (p.federation.rounds for p in plans))]
    return f"Recipe `{recipe.id}`: {', '.join(recipe.datasets)}, {', '.join(trained)}; seed {seeds(contents(made))};"


def not_run(every: list[Cell], made: list[Cell]) -> str:
    run = {cell.row.name for cell in made}
    left = list(dict.fromkeys(cell.row.name for cell in every if cell.row.name not in run))
    text = f" Not run: {', '.join(left)}." if left else ""
    if any(r.content.get("early") for cell in made for r in cell.readings):
        text += " Some runs predate recipes; their partition and settings are the same."
    return text


def reading_text(cell: Cell) -> str:
    """The class of the reading, and how many were tried."""
    reading = cell.row.reading
    return f"{reading.kind} (1 of {reading.tried})" if reading.inferences else reading.kind


def columns(cell: Cell, differ: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and text of every column. differ: the kinds of provenance that are not the same in all rows."""
    found = cell.comparison
    yield "method", cell.row.name
    for name, setting in cell.value:
        yield name, str(setting)
    if len(cell.recipe.measures) > 1:
        yield "measure", cell.measure
    yield "published", published_text(found.published)
    yield "ours", ours_text(cell)
    yield "difference", "-" if found.difference is None else f"{found.difference:+.2f}"
    yield "verdict", found.verdict
    yield "reading", reading_text(cell)
    yield "seeds", str(len(cell.readings))
    yield "read at", cell.readings[0].point
    for name, point in POINTS.items():
        mean = cell.mean(point)
        yield name, "-" if mean is None else f"{mean:.2f}"
    alone = [s for r in cell.readings if (s := seconds_alone(r.content)) is not None]
    yield "seconds", f"{Spread.of(alone).mean:.0f}" if alone else "-"
    origin = origins(contents([cell]))
    for name in differ:
        yield name, ", ".join(origin[name])
