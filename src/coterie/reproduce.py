"""Recipes run, one training after the other or several at a time, and their numbers beside the published ones."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from coterie.api import Execution, ready, run
from coterie.comparison import paired_tests
from coterie.core.errors import CoterieError, unknown
from coterie.core.samples import FederatedData
from coterie.data import at_hand, divide, federate, load, transform
from coterie.federation import Round
from coterie.federation.stopping import Stopped
from coterie.jobs import KEPT, Failures, Task, side_by_side
from coterie.recipes import Plan, Published, Recipe, Row, Value
from coterie.results import Shelf, Unwritable, accuracies, describe, hardware, outcome
from coterie.significance import Spread
from coterie.tables import Table

NEAR = 1.5  # points
MET = "met"  # the verdict on what is as near
Watching = Callable[[str, int], AbstractContextManager[Callable[[Round], None]]]  # title and rounds -> who looks on


class Cell(NamedTuple):
    """One training of a recipe."""

    recipe: Recipe
    row: Row
    value: Value
    plan: Plan
    seed: int

    @property
    def title(self) -> str:
        values = (f"{name}={setting}" for name, setting in self.value)
        return " ".join([self.recipe.id, self.row.name, *values, f"seed {self.seed}"])

    @property
    def data(self) -> tuple[str, str, str, tuple[tuple[str, Any], ...]]:
        """What `prepared` needs to know."""
        return self.plan.dataset, self.recipe.protocol, self.plan.rule, tuple(self.plan.partition.items())


Asked = Sequence[tuple[Recipe, Sequence[Row]]]  # recipes, and which rows of them


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


def cells(asked: Asked, seeds: int, rounds: int | None) -> list[Cell]:
    """All trainings that the rows need, each once; those on the same data one after the other."""
    wanted: dict[tuple[str, int], Cell] = {}
    for recipe, rows in asked:
        for value, row in itertools.product(recipe.values, rows):
            plan = recipe.plan(row, value, rounds)
            for seed in numbers(seeds):
                wanted.setdefault((plan.hash, seed), Cell(recipe, row, value, plan, seed))
    together: dict[Any, list[Cell]] = {}
    for cell in wanted.values():
        together.setdefault(cell.data, []).append(cell)
    return list(itertools.chain(*together.values()))


def numbers(seeds: int) -> range:
    """Of so many seeds."""
    if seeds < 1:
        raise CoterieError(f"seeds must be at least 1, not {seeds}")
    return range(seeds)


def reproduce(
    asked: Asked,
    shelf: Shelf,
    *,
    seeds: int,
    rounds: int | None,
    how: Execution,
    data_dir: str | None,
    commit: str | None,
    watching: Watching,
    jobs: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Run what is not there yet. What went wrong is said at the end, and stops nothing else.

    jobs: trainings at a time. watching: who looks on at a single one. say: told where each of several begins and ends.
    """
    if jobs < 1:
        raise CoterieError(f"jobs must be at least 1, not {jobs}")
    if jobs > 1 and how.clients == "ray":
        raise CoterieError("a Ray cluster is for the clients of one training; leave --jobs or --clients ray out")
    todo = [cell for cell in cells(asked, seeds, rounds) if shelf.find(cell.plan, cell.seed) is None]
    if todo:
        ready(how)
    missing = missing_data({cell.plan.dataset for cell in todo}, data_dir)
    shelf.make()
    todo = [cell for cell in todo if cell.plan.dataset not in missing]
    jobs = max(min(jobs, len(todo)), 1)
    work = partial(train, shelf=shelf, how=how, data_dir=data_dir, commit=commit, jobs=jobs)
    if jobs == 1:
        return [*missing.values(), *one_by_one(todo, partial(work, watching=watching))]
    tasks = [Task(cell.title, cell) for cell in todo]
    return [*missing.values(), *side_by_side(tasks, partial(unwatched, work), jobs, say)]


def one_by_one(todo: Iterable[Cell], work: Callable[[Cell], Any]) -> list[str]:
    """In this process. What went wrong."""
    failures = Failures()
    for cell in todo:
        try:
            work(cell)
        except Unwritable as error:
            raise Unwritable(f"{error}; {KEPT}") from None
        except KeyboardInterrupt as stop:
            raise Stopped(f"stopped; {KEPT}", getattr(stop, "signal", signal.SIGINT)) from None
        except CoterieError as error:
            failures.note(cell.title, str(error))
    return failures.told()


def unwatched(work: Callable[..., dict[str, Any]], cell: Cell) -> str:
    """In a process of its own. Its numbers, as the table will have them."""
    content, recipe = work(cell, watching=lambda title, rounds: nullcontext(lambda record: None)), cell.recipe
    scores = {
        measure: outcome(content, recipe.point(cell.row, measure), recipe.report, average)
        for measure, average in recipe.averages.items()
    }
    told = [f"{measure} {score:.2f}" for measure, score in scores.items() if score is not None]
    return "  ".join([*told, f"{content['seconds']['total']:.0f} s"])


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
    cell: Cell, shelf: Shelf, how: Execution, data_dir: str | None, commit: str | None, watching: Watching, jobs: int
) -> dict[str, Any]:
    """The result, which is on the shelf then. jobs: trainings at a time, of which this is one."""
    recipe, plan, start = cell.recipe, cell.plan, time.perf_counter()
    data = prepared(*cell.data, data_dir)
    federation = asdict(replace(plan.federation, seed=cell.seed))
    with watching(cell.title, plan.federation.rounds) as watch:
        result = run(plan.method, plan.model, data, where=how, watch=watch, protocol=recipe.protocol, **federation)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    content = {
        "recipe": recipe.id,
        "method": cell.row.training,
        "value": dict(cell.value),
        "reduced": plan.federation.rounds != recipe.plan(cell.row, cell.value).federation.rounds,
        "hardware": hardware(how.device) | ({"jobs": jobs} if jobs > 1 else {}),  # which shared it
        "precision": how.precision,
        **describe(result, plan, cell.seed, time.perf_counter() - start, commit),
    }
    shelf.add(recipe.id, cell.row.training, cell.value, plan, cell.seed, content)
    return content


@lru_cache(maxsize=1)
def prepared(
    dataset: str, protocol: str, rule: str, settings: tuple[tuple[str, Any], ...], data_dir: str | None
) -> FederatedData:
    source = replace(load(dataset, data_dir), transform=transform(dataset, protocol))
    return federate(source, divide(source, rule, **dict(settings)))


Found = dict[tuple[str, Value], dict[int, dict[str, Any]]]  # row, value -> seed -> result


def results(recipe: Recipe, rows: Sequence[Row], shelf: Shelf, seeds: int, rounds: int | None) -> Found:
    """What is there of these rows."""
    return {
        (row.name, value): {s: content for s in numbers(seeds) if (content := shelf.find(plan, s)) is not None}
        for row in rows
        for value in recipe.values
        for plan in [recipe.plan(row, value, rounds)]
    }


def report(recipe: Recipe, rows: Sequence[Row], found: Found, rounds: int | None) -> list[Table]:
    """Published beside ours, then paired tests."""
    tables = [beside(recipe, rows, found, rounds)]
    for value in recipe.values:
        for measure in recipe.measures:
            tables += tests(recipe, rows, found, value, measure)
    return tables


def counting(averages: dict[str, str]) -> str:
    """What counts the same, in words."""
    if len(set(averages.values())) == 1:
        return f"every {next(iter(averages.values()))[:-1]} counts the same"
    return ", ".join(f"in {measure} every {average[:-1]} counts the same" for measure, average in averages.items())


def beside(recipe: Recipe, rows: Sequence[Row], found: Found, rounds: int | None) -> Table:
    several = len(recipe.measures) > 1
    lines = []
    for row in rows:
        for value in recipe.values:
            reduced = rounds is not None and rounds != recipe.plan(row, value).federation.rounds
            for measure, average in recipe.averages.items():
                point = recipe.point(row, measure)
                scores = [outcome(c, point, recipe.report, average) for c in found[row.name, value].values()]
                printed = row.published.get(value, {}).get(measure)
                numbers = line(printed, [s for s in scores if s is not None], reduced)
                settings = [str(setting) for _, setting in value]
                lines.append([row.name, *settings, *([measure] if several else []), *numbers, point])
    taken = {"last": "of the last round", "best": "of the best round", "mean of last 10": "mean of the last ten rounds"}
    note = [
        f"Accuracy in percent, {taken[recipe.report]}; {counting(recipe.averages)}. 95 %: half of the "
        f"interval over seeds, by Student's t. Verdict: met is within {NEAR} points of the published number; reduced: "
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
    return Comparison(published, ours, difference, MET if abs(difference) <= NEAR + 1e-9 else "off")


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
