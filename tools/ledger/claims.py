"""Do the papers' claims hold? Ranks and margins per table, and a summary per paper."""

from __future__ import annotations

import statistics
from itertools import product
from typing import Any, NamedTuple

from coterie.papers.recipes import Recipe, RecipeRow, Value, recipes
from coterie.papers.verdicts import SEEDS, interval
from tools.ledger.coverage import identity, plain
from tools.ledger.files import Files
from tools.ledger.noise import setting
from tools.ledger.overview import anchor
from tools.ledger.rankings import Agreement, Estimate, agreement, margin
from tools.ledger.sections import Cell, cells, title

HOLDS, AHEAD, BEHIND, FAILS = "holds", "open, ahead", "open, behind", "fails"
UNSURE_AHEAD, UNSURE_BEHIND = "ahead, no interval", "behind, no interval"
VERDICTS = (HOLDS, AHEAD, BEHIND, FAILS, UNSURE_AHEAD, UNSURE_BEHIND)
LEAST = 3  # methods of a ranking


class TableClaim(NamedTuple):
    """The headline of one column of a table: the paper's method against the best other."""

    recipe: Recipe
    value: Value
    measure: str
    hero: str  # the row that is claimed to be ahead
    rivals: tuple[str, ...]  # of these; empty: of all others
    methods: int
    agreement: Agreement
    published: float  # margin
    rival: str  # best other in our runs
    ours: Estimate
    seeds: int  # least number of seeds of hero and rival
    lead_of: tuple[Any, ...]  # the number that leads, under its name: equal for columns that repeat it
    best: float  # mean of the rival
    stronger: str = ""  # another table that compares the same training with a better rival

    @property
    def where(self) -> str:
        several = [self.measure] if len(self.recipe.measures) > 1 else []
        return " ".join([*(f"{name} {setting}" for name, setting in self.value), *several])

    @property
    def verdict(self) -> str:
        if self.published <= 0:
            return "not claimed"
        if self.ours.low is None or self.ours.high is None:
            return UNSURE_AHEAD if self.ours.value > 0 else UNSURE_BEHIND
        if self.ours.low > 0:
            return HOLDS
        if self.ours.high < 0:
            return FAILS
        return AHEAD if self.ours.value > 0 else BEHIND

    @property
    def shown(self) -> str:
        """The verdict, and whether it is about weaker rivals only."""
        return f"{self.verdict}; a better rival in {self.stronger}" if self.stronger else self.verdict

    @property
    def compared(self) -> str:
        return ", ".join(self.rivals) or "all others"

    @property
    def size(self) -> str:
        """Whether the margin is as large as the published one."""
        if self.ours.low is None or self.ours.high is None:
            return "-"
        return "smaller" if self.published > self.ours.high else "larger" if self.published < self.ours.low else "same"


class Column(NamedTuple):
    """One claim of a paper: in this column of a table, a row is ahead of its rivals."""

    hero: Cell
    rivals: list[Cell]
    compared: tuple[str, ...]  # names of the rivals; empty: all others
    numbers: list[Cell]  # of all methods

    @property
    def published(self) -> float:
        """The margin in print, also over rivals that were not run."""
        return printed(self.hero) - printed(self.best)

    @property
    def best(self) -> Cell:
        return max(self.rivals, key=printed)


def columns(files: Files) -> list[Column]:
    """The claims of all papers, run or not. A column that repeats another one counts once."""
    found: dict[Any, Column] = {}
    for recipe in (files.recipe(r.id) for r in recipes()):
        heroes = {recipe.against: recipe.rivals, **recipe.headlines}
        for value, measure, name in product(recipe.values, recipe.measures, heroes):
            numbers = [
                cell
                for cell in cells(files, recipe)
                if (cell.value, cell.measure) == (value, measure) and cell.comparison.published is not None
            ]
            hero = next((cell for cell in numbers if cell.row.name == name), None)
            rivals = [cell for cell in numbers if hero and is_rival(heroes[name], hero.row, cell.row)]
            if hero and rivals and len(numbers) >= LEAST:
                same = name, frozenset(map(identity, numbers))
                found.setdefault(same, Column(hero, rivals, heroes[name], numbers))
    return list(found.values())


def claims(files: Files) -> list[TableClaim]:
    """The claims whose row and rivals were run."""
    if not files.claims:
        found = [claim for column in columns(files) if (claim := tested(files, column))]
        files.claims[:] = [claim._replace(stronger=stronger(claim, found)) for claim in found]
    return list(files.claims)


def stronger(claim: TableClaim, found: list[TableClaim]) -> str:
    """The table in which the same training meets the best rival, if it is not this one."""
    best = max((other for other in found if other.lead_of == claim.lead_of), key=lambda other: other.best)
    return best.recipe.id if best.best > claim.best else ""


def tested(files: Files, column: Column) -> TableClaim | None:
    own, run = ([cell for cell in found if cell.comparison.ours] for found in (column.numbers, column.rivals))
    hero = column.hero
    if not hero.comparison.ours or not run or len(own) < LEAST:
        return None
    noise = files.noises.get((hero.plan.dataset, SEEDS))
    here = noise if setting(hero.plan) in files.measured.settings else None  # that of other settings decides nothing
    rival = max(run, key=lambda cell: statistics.fmean(cell.scores()))
    return TableClaim(
        hero.recipe,
        hero.value,
        hero.measure,
        hero.row.name,
        column.compared,
        len(own),
        agreement([printed(cell) for cell in own], [interval(cell.scores(), noise) for cell in own], noise),
        column.published,
        rival.row.name,
        margin(by_seed(hero), by_seed(rival), here),
        min(len(hero.readings), len(rival.readings)),
        (*identity(hero), hero.row.name),
        statistics.fmean(rival.scores()),
    )


def is_rival(rivals: tuple[str, ...], hero: RecipeRow, row: RecipeRow) -> bool:
    """Rows that a headline compares with: those that the recipe names, or all that are another training."""
    return row.name in rivals if rivals else row.training != hero.training


def printed(cell: Cell) -> float:
    assert cell.comparison.published is not None
    return cell.comparison.published.mean


def by_seed(cell: Cell) -> dict[int, float]:
    scores = {r.content["seed"]: cell._replace(readings=[r]).scores() for r in cell.readings}
    return {seed: own[0] for seed, own in scores.items() if own}


def table(files: Files) -> str:
    """One line per column of a table."""
    rows = [
        [
            f"[{c.recipe.id}](results.md#{anchor(title(c.recipe))})",
            c.where or "-",
            c.hero,
            c.compared,
            c.rival,
            f"{c.published:+.2f}",
            shown(c.ours, "+.2f"),
            c.shown,
            c.size,
            f"{c.agreement.tau:.2f}",
            "-" if c.agreement.low is None else f"{c.agreement.low:.2f} to {c.agreement.high:.2f}",
            str(c.methods),
            str(c.seeds),
        ]
        for c in claims(files)
    ]
    header = [
        "table",
        "column",
        "method",
        "compared with",
        "best of them here",
        "published lead",
        "our lead",
        "the lead",
        "size",
    ]
    return plain([*header, "Kendall's tau", "expected", "methods", "seeds"], rows)


def shown(found: Estimate, form: str) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


def summary(files: Files) -> str:
    """One line per paper: in how many columns its own method leads, in print and here. A training whose lead is in
    several tables counts in the one with the best rival."""
    rows, found, every_column = [], [c for c in claims(files) if not c.stronger], columns(files)
    for paper in dict.fromkeys(column.hero.recipe.paper for column in every_column):
        leads = [column.published > 0 for column in every_column if column.hero.recipe.paper == paper]
        in_print = f"{sum(leads)} of {len(leads)}"
        if not (own := [claim for claim in found if claim.recipe.paper == paper]):
            rows.append([paper, in_print, "0", *["-"] * (len(VERDICTS) + 3), in_words([], {})])
            continue
        claimed = [claim for claim in own if claim.published > 0]
        counts = {word: sum(claim.verdict == word for claim in claimed) for word in VERDICTS}
        orders = {(claim.recipe.id, claim.value, claim.measure): claim.agreement for claim in own}.values()
        numbers = [len(own), len(claimed), *counts.values()]
        tau = f"{statistics.median(found.tau for found in orders):.2f}"
        judged = [found.expected for found in orders if found.expected is not None]
        expected = f"{sum(judged)} of {len(judged)}" if judged else "-"
        rows.append([paper, in_print, *map(str, numbers), tau, expected, in_words(claimed, counts)])
    header = ["paper", "leads in print", "columns run", "of these claimed", *VERDICTS]
    return plain([*header, "median tau", "order as expected", "the claim to be first"], rows)


def behind(files: Files) -> str:
    """The columns in which a paper's own numbers do not have its method first."""
    found: dict[str, list[str]] = {}
    for column in columns(files):
        if column.published <= 0:
            hero, best = column.hero, column.best
            several = [hero.measure] if len(hero.recipe.measures) > 1 else []
            where = " ".join([hero.recipe.id, *several, *(f"{name} {value}" for name, value in hero.value)])
            text = f"{where} ({hero.row.name} {printed(hero):.2f}, {best.row.name} {printed(best):.2f})"
            found.setdefault(hero.recipe.paper, []).append(text)
    return "\n".join(f"- **{paper}**: {', '.join(texts)}." for paper, texts in found.items())


def in_words(claimed: list[TableClaim], counts: dict[str, int]) -> str:
    """The verdict on a paper, by the columns in which it claims to lead."""
    if not claimed:
        return "not tested: no column was run"
    most = len(claimed) / 2
    if counts[HOLDS] > most:
        return "holds in most columns"
    if counts[FAILS] > most:
        return "fails in most columns"
    ahead = counts[HOLDS] + counts[AHEAD] + counts[UNSURE_AHEAD]
    some = f", fails in {counts[FAILS]}" if counts[FAILS] else ""
    return f"open: ahead in {ahead} of {len(claimed)}, by more than the noise in {counts[HOLDS]}{some}"
