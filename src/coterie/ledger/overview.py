"""All tables of the papers on one screen: how many of their numbers are met, and which are not."""

from __future__ import annotations

import re

from coterie.ledger.files import Files
from coterie.ledger.sections import Cell, cells, title
from coterie.recipes import Recipe
from coterie.reproduce import MET


def overview(files: Files) -> str:
    """One line for each recipe with published numbers and results, but for the folder's own, which only read anew."""
    lines = ["| recipe | met | off, by how much |", "|---|---:|---|"]
    for recipe in files.recipes:
        judged = [cell for cell in cells(files, recipe) if cell.comparison.difference is not None]
        if judged and recipe.id not in files.own:
            lines.append(line(recipe, judged))
    return "\n".join(lines)


def line(recipe: Recipe, judged: list[Cell]) -> str:
    off = [cell for cell in judged if cell.comparison.verdict != MET]
    told = ", ".join(f"{named(cell)} {cell.comparison.difference:+.2f}" for cell in off)
    name = f"[{recipe.id}](#{anchor(title(recipe))}) {recipe.paper}, {recipe.place}"
    return f"| {name} | {len(judged) - len(off)} of {len(judged)} | {told or '-'} |"


def named(cell: Cell) -> str:
    """The row, and what else tells the number from its neighbours."""
    several = [cell.measure] if len(cell.recipe.measures) > 1 else []
    return " ".join([cell.row.name, *several, *(f"{name} {value}" for name, value in cell.value)])


def anchor(heading: str) -> str:
    """Where a link to this heading leads, on the pages that are built as on GitHub's."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()))
