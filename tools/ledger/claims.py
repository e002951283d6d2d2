"""Do the papers' claims hold? Ranks and margins per table, and a summary per paper."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from coterie.papers.recipes import Recipe, RecipeRow, Value, recipes
from coterie.papers.verdicts import SEEDS, interval
from tools.ledger.coverage import every, identity, plain
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
        return ", ".join(self.recipe.rivals) or "all others"

    @property
    def size(self) -> str:
        """Whether the margin is as large as the published one."""
        if self.ours.low is None or self.ours.high is None:
            return "-"
        return "smaller" if self.published > self.ours.high else "larger" if self.published < self.ours.low else "same"


def claims(files: Files) -> list[TableClaim]:
    """All columns with enough methods, the paper's own among them. A column that repeats another one counts once."""
    if files.claims:
        return list(files.claims)
    found, seen = files.claims, set[frozenset[Any]]()
    for recipe in (files.recipe(r.id) for r in recipes()):
        for value in recipe.values:
            for measure in recipe.measures:
                own = [
                    cell
                    for cell in cells(files, recipe)
                    if (cell.value, cell.measure) == (value, measure) and cell.comparison.published is not None
                ]
                same = frozenset(identity(cell) for cell in own if cell.comparison.ours is not None)
                if same not in seen and (claim := of_column(files, recipe, value, measure, own)):
                    found.append(claim)
                    seen.add(same)
    found[:] = [claim._replace(stronger=stronger(claim, found)) for claim in found]
    return list(found)


def stronger(claim: TableClaim, found: list[TableClaim]) -> str:
    """The table in which the same training meets the best rival, if it is not this one."""
    best = max((other for other in found if other.lead_of == claim.lead_of), key=lambda other: other.best)
    return best.recipe.id if best.best > claim.best else ""


def of_column(files: Files, recipe: Recipe, value: Value, measure: str, column: list[Cell]) -> TableClaim | None:
    """column: all its printed numbers, also those that were not run."""
    own = [cell for cell in column if cell.comparison.ours is not None]
    hero = next((cell for cell in own if cell.row.name == recipe.against), None)
    rivals = [cell for cell in column if hero and is_rival(recipe, hero.row, cell.row)]
    if hero is None or not (run := [cell for cell in rivals if cell in own]) or len(own) < LEAST:
        return None
    noise = files.noises.get((hero.plan.dataset, SEEDS))
    here = noise if setting(hero.plan) in files.measured.settings else None  # that of other settings decides nothing
    rival = max(run, key=lambda cell: statistics.fmean(cell.scores()))
    best = max(printed(cell) for cell in rivals)
    return TableClaim(
        recipe,
        value,
        measure,
        len(own),
        agreement([printed(cell) for cell in own], [interval(cell.scores(), noise) for cell in own], noise),
        printed(hero) - best,
        rival.row.name,
        margin(by_seed(hero), by_seed(rival), here),
        min(len(hero.readings), len(rival.readings)),
        (*identity(hero), hero.row.name),
        statistics.fmean(rival.scores()),
    )


def is_rival(recipe: Recipe, hero: RecipeRow, row: RecipeRow) -> bool:
    """Rows that the headline compares with: those that the recipe names, or all that are another training."""
    return row.name in recipe.rivals if recipe.rivals else row.training != hero.training


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
            c.recipe.against,
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
        "best of them",
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
    """One line per paper: in how many columns its own method leads, here and in print. A training whose lead is in
    several tables counts in the one with the best rival."""
    rows = []
    found = [claim for claim in claims(files) if not claim.stronger]
    for paper in dict.fromkeys(cell.recipe.paper for cell in every(files)):
        if not (own := [claim for claim in found if claim.recipe.paper == paper]):
            rows.append([paper, "0", *["-"] * (len(VERDICTS) + 3), in_words([], {})])
            continue
        claimed = [claim for claim in own if claim.published > 0]
        counts = {word: sum(claim.verdict == word for claim in claimed) for word in VERDICTS}
        orders = [claim.agreement for claim in own]
        numbers = [len(own), len(claimed), *counts.values()]
        tau = f"{statistics.median(found.tau for found in orders):.2f}"
        judged = [found.expected for found in orders if found.expected is not None]
        expected = f"{sum(judged)} of {len(judged)}" if judged else "-"
        rows.append([paper, *map(str, numbers), tau, expected, in_words(claimed, counts)])
    header = ["paper", "columns run", "leads in print", *VERDICTS]
    return plain([*header, "median tau", "order as expected", "the claim to be first"], rows)


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
