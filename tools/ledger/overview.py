"""Overview of all tables: the verdicts on their numbers, and the rows that are off."""

from __future__ import annotations

import re
from itertools import chain

from coterie.papers.verdicts import OFF
from tools.ledger.coverage import Tally, printed
from tools.ledger.files import Files
from tools.ledger.sections import Cell, title


def overview(files: Files) -> str:
    """One line per paper and per recipe with results, without the folder's own recipes, which repeat other tables."""
    papers: dict[str, list[list[Cell]]] = {}
    for recipe in files.recipes:
        judged = [cell for cell in printed(files, recipe) if cell.comparison.difference is not None]
        if judged and recipe.id not in files.own:
            papers.setdefault(recipe.paper, []).append(judged)
    lines = ["| recipe | run | met | off | undecided | rows that are off |", "|---|---:|---:|---:|---:|---|"]
    for paper, tables in papers.items():
        lines.append(f"| **{paper}** | {count(list(chain(*tables)))} | |")
        lines += map(line, tables)
    return "\n".join(lines)


def line(judged: list[Cell]) -> str:
    recipe = judged[0].recipe
    off = [f"{named(cell)} {cell.comparison.difference:+.2f}" for cell in judged if cell.comparison.verdict == OFF]
    return f"| [{recipe.id}](#{anchor(title(recipe))}) | {count(judged)} | {', '.join(off)} |"


def count(judged: list[Cell]) -> str:
    tally = Tally.of(judged)
    return " | ".join(map(str, (tally.run, tally.met, tally.off, tally.undecided)))


def named(cell: Cell) -> str:
    """The row, with the measure and values that identify the number."""
    several = [cell.measure] if len(cell.recipe.measures) > 1 else []
    return " ".join([cell.row.name, *several, *(f"{name} {value}" for name, value in cell.value)])


def anchor(heading: str) -> str:
    """The anchor of a heading, on the documentation site and on GitHub."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()))
