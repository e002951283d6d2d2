"""Runs recipes, one or several trainings at a time."""

from __future__ import annotations

import hashlib
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from coterie.api import VARY, Execution, execute, ready
from coterie.api.progress import Watching, unwatched
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, unknown
from coterie.core.names import spelling
from coterie.data import divide, federate, is_available, load, transform
from coterie.federation import Round
from coterie.papers.recipes import Plan, Recipe, RecipeRow, Value
from coterie.papers.results import Found, Shelf, Unwritable, committed, describe, hardware, outcome, plain, stem
from coterie.papers.unfinished import continuing, earlier, place, remove
from coterie.runs.jobs import KEPT, Failures, JobSpec, side_by_side
from coterie.runs.stopping import Stopped

LONG = 100  # rounds from which a trial is worth its time
OVER = "--max-time is over"


class OutOfTime(CoterieError):
    """--max-time is over. A training that was cut off gives no result yet; the next call continues it."""


def over(deadline: float | None) -> bool:
    """deadline: seconds since the epoch."""
    return deadline is not None and time.time() >= deadline


class Training(NamedTuple):
    """One training of a recipe."""

    recipe: Recipe
    row: RecipeRow
    value: Value
    plan: Plan
    seed: int

    @property
    def title(self) -> str:
        values = (f"{name}={setting}" for name, setting in self.value)
        return " ".join([self.recipe.id, self.row.name, *values, f"seed {self.seed}"])

    @property
    def data(self) -> tuple[str, str, str, tuple[tuple[str, Any], ...]]:
        """Arguments of `prepared`."""
        partition = dict(self.plan.partition)
        if partition.get("seed") == VARY:
            partition["seed"] = self.seed
        return self.plan.dataset, self.recipe.protocol, self.plan.rule, tuple(partition.items())


Selection = Sequence[tuple[Recipe, Sequence[RecipeRow]]]  # recipes, and their rows to run


def chosen_rows(recipe: Recipe, methods: Sequence[str] | None) -> list[RecipeRow]:
    """Rows of these methods, by their names in the paper or in Coterie; all rows by default."""
    if recipe.instead is not None:
        raise CoterieError(f"{recipe.id} is not a training: {recipe.instead}")
    if not methods:
        return list(recipe.rows)
    found = []
    for wanted in methods:
        rows = [row for row in recipe.rows if spelling(wanted) in (spelling(row.name), spelling(row.method))]
        if not rows:
            raise unknown(f"method of {recipe.id}", wanted, {row.method for row in recipe.rows})
        found += rows
    return [row for row in recipe.rows if row in found]


def cells(selection: Selection, seeds: int, rounds: int | None) -> list[Training]:
    """All distinct trainings of the rows, grouped by data."""
    wanted: dict[tuple[str, int], Training] = {}
    for recipe, rows in selection:
        for value, row in itertools.product(recipe.values, rows):
            plan = recipe.plan(row, value, rounds)
            for seed in numbers(seeds):
                wanted.setdefault((plan.hash, seed), Training(recipe, row, value, plan, seed))
    together: dict[Any, list[Training]] = {}
    for cell in wanted.values():
        together.setdefault(cell.data, []).append(cell)
    return list(itertools.chain(*together.values()))


def numbers(seeds: int) -> range:
    """Seeds 0 ... seeds - 1."""
    if seeds < 1:
        raise CoterieError(f"seeds must be at least 1, got {seeds}")
    return range(seeds)


def reproduce(
    selection: Selection,
    shelf: Shelf,
    *,
    seeds: int,
    rounds: int | None,
    how: Execution,
    data_dir: str | None,
    commit: str | None,
    watching: Watching,
    jobs: int = 1,
    max_seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Run the trainings without a result, and return what failed; a failure does not stop the others.

    jobs: trainings at a time. watching: observes a single training. say: prints where each of several starts and ends.
    max_seconds: what is not finished then is continued by the next call, after the last complete round.
    """
    deadline = None if max_seconds is None else time.time() + max_seconds
    if jobs < 1:
        raise CoterieError(f"jobs must be at least 1, got {jobs}")
    if jobs > 1 and how.backend == "ray":
        raise CoterieError("--jobs and --backend ray cannot be combined: a cluster runs the clients of one training")
    todo = [cell for cell in cells(selection, seeds, rounds) if shelf.find(cell.plan, cell.seed) is None]
    if todo:
        ready(how)
    missing = missing_data({cell.plan.dataset for cell in todo}, data_dir)
    shelf.make()
    todo = [cell for cell in todo if cell.plan.dataset not in missing]
    jobs = max(min(jobs, len(todo)), 1)
    if sum(cell.plan.federation.rounds for cell in todo) >= LONG:
        say(forecast(todo, how, data_dir))
    work = partial(train, shelf=shelf, how=how, data_dir=data_dir, commit=commit, jobs=jobs, deadline=deadline)
    if jobs == 1:
        failures = one_by_one(todo, partial(timely, partial(work, watching=watching)))
    else:
        specs = [JobSpec(cell.title, cell) for cell in todo]
        failures = side_by_side(specs, partial(timely, partial(in_its_process, work)), jobs, say)
    if over(deadline):
        say(f"{OVER}; the same command continues")
    return [*missing.values(), *failures]


def forecast(todo: Sequence[Training], how: Execution, data_dir: str | None) -> str:
    """The trainings to run, and their estimated time, from the second of two rounds of the first training."""
    cell, steps = todo[0], sum(cell.plan.work for cell in todo)
    plan, data = cell.plan, prepared(*cell.data, data_dir)
    federation = asdict(replace(plan.federation, rounds=2, full_last_round=False, seed=cell.seed))
    names = ", ".join(dict.fromkeys(cell.plan.dataset for cell in todo))
    needed = f"{len(todo)} trainings of {steps / 1e6:.1f} million local steps on {names}"
    try:
        result = execute(plan.method, data, plan.model, backend=how, protocol=cell.recipe.protocol, **federation)
    except CoterieError as error:  # reported again when its turn comes
        return f"{needed}; the time is unknown: {cell.row.name} failed in a trial ({error})"
    per_step = sum(result.history[1].seconds.values()) * plan.federation.rounds / plan.work
    return (
        f"{needed}: about {duration(per_step * steps)} one after the other, judging from a round of {cell.row.name}; "
        "--jobs N runs N side by side"
    )


def duration(seconds: float) -> str:
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class Titled(Protocol):
    @property
    def title(self) -> str: ...


T = TypeVar("T", bound=Titled)


def one_by_one(todo: Iterable[T], work: Callable[[T], Any]) -> list[str]:
    """Train in this process; returns what failed."""
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
    return failures.lines()


def timely(work: Callable[[T], Any], cell: T) -> Any:
    """Do the work; the end of the time is no failure."""
    try:
        return work(cell)
    except OutOfTime as late:
        return f"{OVER}: {late}"


def in_its_process(work: Callable[..., dict[str, Any]], cell: Training) -> str:
    """Train in a separate process; returns its numbers as in the table."""
    content, recipe = work(cell, watching=unwatched), cell.recipe
    scores = {
        measure: outcome(content, recipe.point(cell.row, measure), recipe.report, average)
        for measure, average in recipe.averages.items()
    }
    shown = [f"{measure} {score:.2f}" for measure, score in scores.items() if score is not None]
    return "  ".join([*shown, f"{content['seconds']['total']:.0f} s"])


def missing_data(datasets: set[str], data_dir: str | None) -> dict[str, str]:
    """Dataset -> what to fetch. Raises if all are missing."""
    missing: dict[str, str] = {}
    for dataset in sorted(datasets):
        if not is_available(dataset, data_dir):
            try:
                load(dataset, data_dir)
            except CoterieError as error:
                missing[dataset] = str(error)
    if missing and len(missing) == len(datasets):
        raise CoterieError("; ".join(missing.values()))
    return missing


def train(
    cell: Training,
    shelf: Shelf,
    how: Execution,
    data_dir: str | None,
    commit: str | None,
    watching: Watching,
    jobs: int,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Train, store and return the result. jobs: number of trainings that share the machine."""
    recipe, plan, start = cell.recipe, cell.plan, time.perf_counter()
    if over(deadline):
        raise OutOfTime("not started")
    data = prepared(*cell.data, data_dir)
    federation = asdict(replace(plan.federation, seed=cell.seed))
    name = f"{plain(recipe.id)}-{stem(cell.row.training, cell.value, plan, cell.seed)}"
    folder = place(shelf.folder, f"{name}-{commit or committed() or 'unknown'}")  # no result is of two commits
    made: list[Round] = []
    with watching(cell.title, plan.federation.rounds) as watch:

        def note(record: Round) -> None:
            made.append(record)
            watch(record)

        result = execute(
            plan.method, data, plan.model, backend=how, watch=note, protocol=recipe.protocol, **federation,
            **continuing(folder, deadline),
        )  # fmt: skip
    if len(result.history) < plan.federation.rounds:
        raise OutOfTime(f"round {len(result.history)} of {plan.federation.rounds} is kept")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    content = {
        "recipe": recipe.id,
        "recipe_commit": (recipe.path and committed(recipe.path)) or commit,
        "recipe_hash": recipe.path and hashlib.sha256(recipe.path.read_bytes()).hexdigest(),
        "method": cell.row.training,
        "value": dict(cell.value),
        "reduced": plan.federation.rounds != recipe.plan(cell.row, cell.value).federation.rounds,
        "hardware": hardware(how.device) | ({"jobs": jobs} if jobs > 1 else {}),  # they share the machine
        "precision": how.precision,
        **describe(result, plan, cell.seed, time.perf_counter() - start + earlier(result.history, made), commit),
    }
    shelf.add(recipe.id, cell.row.training, cell.value, plan, cell.seed, content)
    remove(folder)
    return content


@lru_cache(maxsize=1)
def prepared(
    dataset: str, protocol: str, rule: str, settings: tuple[tuple[str, Any], ...], data_dir: str | None
) -> FederatedData:
    source = replace(load(dataset, data_dir), transform=transform(dataset, protocol))
    return federate(source, divide(source, rule, **dict(settings)))


def results(recipe: Recipe, rows: Sequence[RecipeRow], shelf: Shelf, seeds: int, rounds: int | None) -> Found:
    """Stored results of these rows."""
    return {
        (row.name, value): {s: content for s in numbers(seeds) if (content := shelf.find(plan, s)) is not None}
        for row in rows
        for value in recipe.values
        for plan in [recipe.plan(row, value, rounds)]
    }
