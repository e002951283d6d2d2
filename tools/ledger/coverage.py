"""How many of the papers' printed numbers were run, and how they were judged: by table, by reading, and held out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.tables import TextTable, markdown
from coterie.core.errors import CoterieError
from coterie.papers.recipes import READINGS, Recipe, recipes
from coterie.papers.verdicts import MET, NOT_RUN, OFF, UNDECIDED, RunNoise, verdict
from tools.ledger.files import Files
from tools.ledger.sections import Cell, cells

JUDGED = (MET, OFF, UNDECIDED)
TIME = "GPU time"


class Tally(NamedTuple):
    """Verdicts on different numbers."""

    met: int
    off: int
    undecided: int
    left: int  # not run

    @staticmethod
    def of(found: Iterable[Cell]) -> Tally:
        counts = Counter(cell.comparison.verdict for cell in once(found))
        return Tally(*(counts[verdict] for verdict in (*JUDGED, NOT_RUN)))

    @property
    def run(self) -> int:
        return self.met + self.off + self.undecided

    @property
    def all(self) -> int:
        return self.run + self.left


def near(found: Iterable[Cell]) -> int:
    """How many means lie within the band, whatever their intervals."""
    judged = [(cell.comparison.difference, cell.comparison.band) for cell in once(found)]
    return sum(abs(d) <= band for d, band in judged if d is not None and band is not None)


def printed(files: Files, recipe: Recipe) -> list[Cell]:
    """The numbers that the paper prints in this table. A number that it prints once for several recipes counts once."""
    return [cell for cell in cells(files, recipe) if cell.comparison.published is not None and cell.row.repeats is None]


def every(files: Files) -> list[Cell]:
    """All printed numbers of all papers, tables that copy from others last; recipes of the folder repeat them."""
    order = sorted(recipes(), key=lambda recipe: not recipe.copies.keys() <= {recipe.id})
    return [cell for recipe in order for cell in printed(files, files.recipe(recipe.id))]


def once(found: Iterable[Cell]) -> list[Cell]:
    """Different numbers: each as in the first of the cells that repeat it."""
    first: dict[Any, Cell] = {}
    for cell in found:
        first.setdefault(identity(cell), cell)
    return list(first.values())


def copied(files: Files, recipe: Recipe) -> int:
    """How many numbers the table prints that are verbatim copies of another table's, which has the rows."""
    found = 0
    for name, rows in recipe.copies.items():
        other = {row.name: row for row in files.recipe(name).rows}
        for row in rows:
            if row not in other:
                raise CoterieError(f"{recipe.id}: copies: {name} has no row '{row}'")
            found += sum(map(len, other[row].published.values()))
    return found


def identity(cell: Cell) -> tuple[Any, ...]:
    """Equal for copies of one number: the same training, measured in the same way, and the same printed value."""
    recipe = cell.recipe
    point, average = recipe.point(cell.row, cell.measure), recipe.averages[cell.measure]
    assert cell.comparison.published is not None
    return cell.plan.hash, point, recipe.report, average, cell.comparison.published.mean


def held_out(files: Files) -> list[Cell]:
    """The printed numbers that no reading was chosen on, nor on a copy of them."""
    found = every(files)
    used = {on for cell in found for on in cell.row.reading.fitted_on}
    chosen = {identity(cell) for cell in found if (cell.recipe.id, cell.row.name) in used}
    return [cell for cell in found if identity(cell) not in chosen]


def chance(files: Files, found: Iterable[Cell]) -> float:
    """Expected number of these that are met if the published numbers of a column are shuffled among its methods."""
    columns: dict[Any, list[Cell]] = {}
    for cell in every(files):
        if cell.comparison.ours is not None:
            columns.setdefault(column(cell), []).append(cell)
    return math.fsum(by_chance(cell, columns[column(cell)]) for cell in once(found) if cell.comparison.ours is not None)


def column(cell: Cell) -> tuple[Any, ...]:
    return cell.recipe.id, cell.value, cell.measure


def coverage(files: Files, gaps: Mapping[str, str]) -> str:
    """One line per table of every paper. gaps: dataset or recipe -> why it was not run."""
    tables: dict[tuple[str, str], list[Recipe]] = {}
    for recipe in map(files.recipe, (r.id for r in recipes())):
        if printed(files, recipe):
            tables.setdefault((recipe.paper, recipe.place), []).append(recipe)
    different: dict[tuple[str, str], list[Cell]] = {}
    for cell in once(every(files)):
        different.setdefault((cell.recipe.paper, cell.recipe.place), []).append(cell)
    lines, total, counts = [], Tally(0, 0, 0, 0), (0, 0)
    for (paper, place), found in tables.items():
        own = different.get((paper, place), [])
        tally, here = Tally.of(own), sum(len(printed(files, recipe)) for recipe in found)
        copies = sum(copied(files, recipe) for recipe in found)
        lines.append([paper, place, *numbers(here, copies, tally), why(own, gaps)])
        total = Tally(*map(sum, zip(total, tally, strict=True)))
        counts = counts[0] + here, counts[1] + copies
    lines.append(["**all**", "", *numbers(*counts, total), ""])
    header = ["paper", "table", "printed", "copies", "without copies", "different"]
    return plain([*header, "run", "met", "off", "undecided", "not run", "why not"], lines)


def numbers(here: int, copies: int, tally: Tally) -> list[str]:
    shown = (here + copies, copies, here, tally.all, tally.run, tally.met, tally.off, tally.undecided, tally.left)
    return [str(number) for number in shown]


def why(found: Iterable[Cell], gaps: Mapping[str, str]) -> str:
    """The reasons for numbers that were not run, with their counts."""
    reasons = Counter(
        gaps.get(cell.recipe.id) or gaps.get(cell.plan.dataset) or TIME
        for cell in found
        if cell.comparison.verdict == NOT_RUN
    )
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())


def by_reading(files: Files) -> str:
    """Verdicts per class of reading, and on the numbers that no reading was chosen on."""
    found = every(files)
    groups = {f"{kind}: {text}": [c for c in found if c.row.reading.kind == kind] for kind, text in READINGS.items()}
    groups |= {"**all**": found, "**held out**: no reading was chosen on them": held_out(files)}
    rows = []
    for name, own in groups.items():
        tally, shuffled = Tally.of(own), chance(files, own)
        rows.append([name, *map(str, (tally.all, tally.run, *tally[:3])), f"{shuffled:.1f}", str(near(own))])
    header = ["reading", "different numbers", "run", "met", "off", "undecided", "met by chance"]
    return plain([*header, "mean within the band"], rows)


def noise_table(files: Files) -> str:
    """The noise between runs, and the bands that follow from it."""
    rows = [
        [dataset, kind, f"{noise.std:.2f}", str(noise.cells), str(noise.freedom), f"± {noise.band:.2f}", where(noise)]
        for (dataset, kind), noise in files.noises.items()
    ]
    header = ["dataset", "what differs", "standard deviation", "cells", "degrees of freedom", "band"]
    return plain([*header, "measured in the setting of"], rows)


def where(noise: RunNoise) -> str:
    return ", ".join(f"`{recipe}`" for recipe in noise.measured_in)


def plain(header: list[str], rows: list[list[str]]) -> str:
    return markdown(TextTable("", header, rows)).strip().split("\n", 2)[2]


def by_chance(cell: Cell, own: Sequence[Cell]) -> float:
    """Probability that a number is met if the published numbers of its column are shuffled among the methods."""
    ours, band = cell.comparison.ours, cell.comparison.band
    published = [other.comparison.published.mean for other in own if other.comparison.published]
    if ours is None or not published:
        return 0.0
    return sum(verdict(ours.mean - number, ours.half, band) == MET for number in published) / len(published)
