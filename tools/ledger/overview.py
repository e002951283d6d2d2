"""Overview of all tables: how many published numbers are met, and which are not."""

from __future__ import annotations

import re
from itertools import chain

from tools.ledger.files import Files
from tools.ledger.sections import Cell, cells, title


def overview(files: Files) -> str:
    """One line per paper and per recipe with results, without the folder's own recipes, which repeat other tables."""
    papers: dict[str, list[list[Cell]]] = {}
    for recipe in files.recipes:
        judged = [cell for cell in cells(files, recipe) if cell.comparison.difference is not None]
        if judged and recipe.id not in files.own:
            papers.setdefault(recipe.paper, []).append(judged)
    lines = ["| recipe | met | off |", "|---|---:|---|"]
    for paper, tables in papers.items():
        lines.append(f"| **{paper}** | {count(list(chain(*tables)))} | |")
        lines += map(line, tables)
    return "\n".join(lines)


def line(judged: list[Cell]) -> str:
    recipe = judged[0].recipe
    off = [f"{named(cell)} {cell.comparison.difference:+.2f}" for cell in judged if not cell.met]
    return f"| [{recipe.id}](#{anchor(title(recipe))}) | {count(judged)} | {', '.join(off)} |"


def count(judged: list[Cell]) -> str:
    return f"{sum(cell.met for cell in judged)} of {len(judged)}"


def named(cell: Cell) -> str:
    """The row, with the measure and values that identify the number."""
    several = [cell.measure] if len(cell.recipe.measures) > 1 else []
    return " ".join([cell.row.name, *several, *(f"{name} {value}" for name, value in cell.value)])


def anchor(heading: str) -> str:
    """The anchor of a heading, on the documentation site and on GitHub."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()))
