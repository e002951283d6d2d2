"""Recipes run, one training after the other, and their numbers beside the published ones."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from coterie.api import Execution, run
from coterie.comparison import paired_tests
from coterie.core.errors import CoterieError, unknown
from coterie.core.samples import FederatedData
from coterie.data import at_hand, divide, federate, load, transform
from coterie.federation import Round
from coterie.recipes import Plan, Published, Recipe, Row, Value
from coterie.results import Shelf, accuracies, describe, hardware, outcome
from coterie.significance import Spread
from coterie.tables import Table

log = logging.getLogger("coterie")
NEAR = 1.5  # points
Watching = Callable[[str, int], AbstractContextManager[Callable[[Round], None]]]  # title and rounds -> who looks on


class Cell(NamedTuple):
    """One training of a recipe."""

    row: Row
    value: Value
    plan: Plan
    seed: int

    @property
    def title(self) -> str:
        return " ".join([self.row.name, *(f"{name}={setting}" for name, setting in self.value), f"seed {self.seed}"])


def chosen_rows(recipe: Recipe, methods: Sequence[str] | None) -> list[Row]:
    """The rows of these methods, named as in the paper or as in Coterie; all if none is named."""
    if recipe.instead is not None:
        raise CoterieError(f"{recipe.id} is not a training: {recipe.instead}")
    if not methods:
        return list(recipe.rows)
    found = []
    for wanted in methods:
        rows = [row for row in recipe.rows if letters(wanted) in (letters(row.name), letters(row.method))]
        if not rows:
            raise unknown(f"method of {recipe.id}", wanted, {row.method for row in recipe.rows})
        found += rows
    return [row for row in recipe.rows if row in found]


def letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def cells(recipe: Recipe, rows: Iterable[Row], seeds: int, rounds: int | None) -> list[Cell]:
    """All trainings that the rows need, each once; those on the same data one after the other."""
    if seeds < 1:
        raise CoterieError(f"seeds must be at least 1, not {seeds}")
    wanted: dict[tuple[str, int], Cell] = {}
    for value, row in itertools.product(recipe.values, rows):
        plan = recipe.plan(row, value, rounds)
        for seed in range(seeds):
            wanted.setdefault((plan.hash, seed), Cell(row, value, plan, seed))
    return list(wanted.values())


def reproduce(
    recipe: Recipe,
    rows: Sequence[Row],
    shelf: Shelf,
    *,
    seeds: int,
    rounds: int | None,
    how: Execution,
    data_dir: str | None,
    commit: str | None,
    watching: Watching,
) -> list[str]:
    """Run what is not there yet. What went wrong is said at the end, and stops nothing else."""
    todo = [cell for cell in cells(recipe, rows, seeds, rounds) if shelf.find(cell.plan, cell.seed) is None]
    wrong = missing_data({cell.plan.dataset for cell in todo}, data_dir)
    shelf.make()
    for cell in todo:
        if cell.plan.dataset in wrong:
            continue
        try:
            train(recipe, cell, shelf, how, data_dir, commit, watching)
        except CoterieError as error:
            log.warning("%s %s: %s", recipe.id, cell.title, error)
            wrong[cell.title] = f"{cell.title}: {error}"
    return list(wrong.values())


def missing_data(datasets: set[str], data_dir: str | None) -> dict[str, str]:
    """Dataset -> what to fetch. An error if there is none to go on with."""
    missing: dict[str, str] = {}
    for dataset in sorted(datasets):
        if not at_hand(dataset, data_dir):
            try:
                load(dataset, data_dir)
            except CoterieError as error:
                missing[dataset] = str(error)
    if missing and len(missing) == len(datasets):
        raise CoterieError("; ".join(missing.values()))
    return missing


def train(
    recipe: Recipe,
    cell: Cell,
    shelf: Shelf,
    how: Execution,
    data_dir: str | None,
    commit: str | None,
    watching: Watching,
) -> None:
    plan, start = cell.plan, time.perf_counter()
    data = prepared(plan.dataset, recipe.protocol, plan.rule, tuple(plan.partition.items()), data_dir)
    federation = asdict(replace(plan.federation, seed=cell.seed))
    with watching(f"{recipe.id} {cell.title}", plan.federation.rounds) as watch:
        result = run(plan.method, plan.model, data, where=how, watch=watch, protocol=recipe.protocol, **federation)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    content = {
        "recipe": recipe.id,
        "method": cell.row.training,
        "value": dict(cell.value),
        "reduced": plan.federation.rounds != recipe.plan(cell.row, cell.value).federation.rounds,
        "hardware": hardware(how.device),
        "precision": how.precision,
        **describe(result, plan, cell.seed, time.perf_counter() - start, commit),
    }
    shelf.add(recipe.id, cell.row.training, cell.value, plan, cell.seed, content)


@lru_cache(maxsize=1)
def prepared(
    dataset: str, protocol: str, rule: str, settings: tuple[tuple[str, Any], ...], data_dir: str | None
) -> FederatedData:
    source = replace(load(dataset, data_dir), transform=transform(dataset, protocol))
    return federate(source, divide(source, rule, **dict(settings)))


def report(recipe: Recipe, rows: Sequence[Row], shelf: Shelf, seeds: int, rounds: int | None) -> list[Table]:
    """Published beside ours, then paired tests."""
    found = {
        (row.name, value): {seed: content for seed in range(seeds) if (content := shelf.find(plan, seed)) is not None}
        for row in rows
        for value in recipe.values
        for plan in [recipe.plan(row, value, rounds)]
    }
    tables = [beside(recipe, rows, found, rounds)]
    for value in recipe.values:
        for measure in recipe.measures:
            tables += tests(recipe, rows, found, value, measure)
    return tables


Found = dict[tuple[str, Value], dict[int, dict[str, Any]]]  # row, value -> seed -> result


def beside(recipe: Recipe, rows: Sequence[Row], found: Found, rounds: int | None) -> Table:
    several = len(recipe.measures) > 1
    lines = []
    for row in rows:
        for value in recipe.values:
            reduced = rounds is not None and rounds != recipe.plan(row, value).federation.rounds
            for measure in recipe.measures:
                point = recipe.point(row, measure)
                scores = [outcome(c, point, recipe.report, recipe.average) for c in found[row.name, value].values()]
                printed = row.published.get(value, {}).get(measure)
                numbers = line(printed, [s for s in scores if s is not None], reduced)
                settings = [str(setting) for _, setting in value]
                lines.append([row.name, *settings, *([measure] if several else []), *numbers, point])
    taken = {"last": "of the last round", "best": "of the best round", "mean of last 10": "mean of the last ten rounds"}
    note = [
        f"Accuracy in percent, {taken[recipe.report]}; every {recipe.average[:-1]} counts the same. 95 %: half of the "
        f"interval over seeds, by Student's t. Verdict: within {NEAR} points of the published number, or off; reduced: "
        "other rounds than the paper's, so not comparable.",
        *recipe.notes,
    ]
    header = [
        "method",
        *recipe.vary,
        *(["measure"] if several else []),
        "published",
        "ours",
        "std",
        "95 %",
        "difference",
    ]
    title = f"{recipe.id}: {recipe.paper}, {recipe.place}"
    return Table(title, [*header, "verdict", "seeds", "read at"], lines, " ".join(note))


class Comparison(NamedTuple):
    """One cell of a table: the paper's number and ours, in percent."""

    published: Published | None
    ours: Spread | None  # None: not run
    difference: float | None
    verdict: str


def compared(published: Published | None, scores: Sequence[float], reduced: bool = False) -> Comparison:
    if not scores:
        return Comparison(published, None, None, "not run")
    ours = Spread.of(scores)
    if reduced or published is None:
        return Comparison(published, ours, None, "reduced" if reduced else "-")
    difference = ours.mean - published.mean
    return Comparison(published, ours, difference, f"within {NEAR}" if abs(difference) <= NEAR + 1e-9 else "off")


def published_text(published: Published | None) -> str:
    if published is None:
        return "-"
    return f"{published.mean:.2f}" + (f" ± {published.std:.2f}" if published.std is not None else "")


def line(published: Published | None, scores: Sequence[float], reduced: bool) -> list[str]:
    found = compared(published, scores, reduced)
    numbers = ("-", "-", "-") if found.ours is None else ["-" if v is None else f"{v:.2f}" for v in found.ours]
    difference = "-" if found.difference is None else f"{found.difference:+.2f}"
    return [published_text(published), *numbers, difference, found.verdict, str(len(scores))]


def tests(recipe: Recipe, rows: Sequence[Row], found: Found, value: Value, measure: str) -> list[Table]:
    """Every row against the recipe's own, at one value; none if that was not run."""
    samples = {
        row.name: {
            (seed, client): accuracy
            for seed, content in found[row.name, value].items()
            for client, accuracy in accuracies(content, recipe.point(row, measure)).items()
        }
        for row in rows
    }
    samples = {name: own for name, own in samples.items() if own}
    if recipe.against not in samples or len(samples) < 2:
        return []
    where = [*(f"{name} {setting}" for name, setting in value), *([measure] if len(recipe.measures) > 1 else [])]
    title = ", ".join([f"{recipe.id}: paired tests, difference in points", *where])
    return [paired_tests(samples, recipe.against, title)]
