"""A folder of result files, each validated when it is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError
from coterie.papers.figures import figure
from coterie.papers.matching import asked_by
from coterie.papers.recipes import Plan, Recipe, RecipeRow, Value, find, read_recipe, recipes
from coterie.papers.results import Found, checked, load
from coterie.papers.verdicts import Noises
from coterie.runs.disk import check_tree
from tools.ledger.noise import Measured, measured

FIRST = "1"  # the campaign of results that are not in a folder of their own
CAMPAIGNS = "campaigns"
FINDINGS, HYPOTHESES = "findings.yaml", "hypotheses.yaml"  # the files that are no recipes


class Reading(NamedTuple):
    """One training, and the point at which a table cell measures it."""

    content: dict[str, Any]
    point: str


class Early(NamedTuple):
    """A file that predates recipes: several methods on one setting, converted to the format of results."""

    trainings: dict[str, dict[str, Any]]  # method -> result
    rows: dict[str, dict[str, list[str]]]  # recipe -> row -> method, point


class Files:
    """`RECIPE/*.json` written by `coterie reproduce`, `RECIPE.yaml` of recipes that are not part of Coterie, and
    `*.json` with cells, which predate recipes.

    `campaigns/NAME/RECIPE/*.json`: results of one campaign, in which no recipe changes. A cell shows its
    newest campaign, never a mixture. Results outside of `campaigns` are the first campaign, which predates this rule.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CoterieError(f"folder {folder} not found; pass the folder of results with --results")
        self.folder = folder
        check_tree(folder)
        places = {FIRST: folder} | {path.name: path for path in sorted((folder / CAMPAIGNS).glob("*")) if path.is_dir()}
        self.results: dict[Path, dict[str, Any]] = {}
        for campaign, place in places.items():
            found = {
                path: checked(path) | {"campaign": campaign, "folder": path.parent.name}
                for path in sorted(place.glob("*/*.json"))
            }
            if campaign != FIRST:
                check_frozen(campaign, found)
            self.results |= found
        self.by_kind: dict[str, list[dict[str, Any]]] = {}
        for content in self.results.values():
            self.by_kind.setdefault(kind(content["settings"]), []).append(content)
        loaded = {path: load(path) for path in sorted(folder.glob("*.json"))}
        self.early = {p.stem: early(p, c) for p, c in loaded.items() if isinstance(c, dict) and "cells" in c}
        self.own = {
            path.stem: path for path in sorted(folder.glob("*.yaml")) if path.name not in (FINDINGS, HYPOTHESES)
        }
        self.recipe = cache(self._recipe)
        self.cells: dict[str, list[Any]] = {}  # recipe -> its numbers; filled by sections.cells
        self.claims: list[Any] = []  # filled by claims.claims
        self.plans: dict[tuple[str, str, Value], Plan] = {}
        self._check_recipes()

    def _recipe(self, name: str) -> Recipe:
        if name in self.own:
            return read_recipe(self.own[name])
        return next((recipe for recipe in recipes() if recipe.id == name), None) or find(name)

    def _check_recipes(self) -> None:
        named = [(path, content["recipe"]) for path, content in self.results.items()]
        named += [(self.folder / f"{name}.json", recipe) for name, early in self.early.items() for recipe in early.rows]
        for path, recipe in named:
            try:
                self.recipe(recipe)
            except CoterieError as error:
                raise CoterieError(f"{path}: {error}") from None

    @cached_property
    def recipes(self) -> list[Recipe]:
        """Recipes with results, in the order of `coterie recipes`, then the folder's own.

        If its trainings were made for other recipes, a recipe of the folder is listed if it has at least one, and a
        figure only if it has all.
        """
        named = {content["recipe"] for content in self.results.values()}
        named |= {recipe for early in self.early.values() for recipe in early.rows}
        named |= {name for name in self.own if any(found for _, found in self._each(self.recipe(name)))}
        named |= {r.id for r in recipes() if r.figure and all(found for _, found in self._each(r))}
        order = [*(recipe.id for recipe in recipes()), *self.own]
        return sorted(map(self.recipe, named), key=lambda recipe: order.index(recipe.id))

    @property
    def has_leaderboard(self) -> bool:
        return (self.folder / "leaderboard.json").is_file()

    @cached_property
    def measured(self) -> Measured:
        return measured(self.repeated())

    @property
    def noises(self) -> Noises:
        """The noise between runs, per dataset."""
        return self.measured.noises

    def repeated(self) -> Iterator[tuple[Recipe, str, Plan, Reading]]:
        """Every training that a table shows, with its recipe, measure and plan."""
        for recipe in self.recipes:
            for row, value, measure in itertools.product(recipe.rows, recipe.values, recipe.measures):
                for reading in self.readings(recipe, row, value, measure):
                    yield recipe, measure, self.plan(recipe, row, value), reading

    def readings(self, recipe: Recipe, row: RecipeRow, value: Value, measure: str) -> list[Reading]:
        """The trainings of a cell in its newest campaign, by seed; those of early files only if there are no others."""
        plan = self.plan(recipe, row, value)
        fits, made = asked_by(plan), dict[str, dict[int, dict[str, Any]]]()
        for content in self.by_kind.get(kind(plan.settings), ()):
            if fits(content):
                made.setdefault(content["campaign"], {}).setdefault(content["seed"], content)
        if made:
            newest = made[list(made)[-1]]  # by_kind is in the order of campaigns
            return [Reading(newest[seed], recipe.point(row, measure)) for seed in sorted(newest)]
        found = []
        for early in self.early.values():
            if row.name in early.rows.get(recipe.id, {}):
                method, point = early.rows[recipe.id][row.name]
                found.append(Reading(early.trainings[method], point))
        return found

    def plan(self, recipe: Recipe, row: RecipeRow, value: Value) -> Plan:
        """The training of a row, made once."""
        key = recipe.id, row.name, value
        if key not in self.plans:
            self.plans[key] = recipe.plan(row, value)
        return self.plans[key]

    def found(self, recipe: Recipe) -> Found:
        """All trainings that a recipe shows, by row and value."""
        return dict(self._each(recipe))

    def picture(self, recipe: Recipe) -> str | None:
        """The figure of a recipe as SVG; None if it has none, or nothing to draw."""
        return figure(recipe, self.found(recipe))

    def _each(self, recipe: Recipe) -> Iterator[tuple[tuple[str, Value], dict[int, dict[str, Any]]]]:
        """(row, value), and their trainings by seed."""
        for row, value in itertools.product(recipe.rows, recipe.values):
            readings = self.readings(recipe, row, value, next(iter(recipe.measures)))
            yield (row.name, value), {reading.content["seed"]: reading.content for reading in readings}

    def in_no_table(self) -> list[Path]:
        """Results whose settings differ from their recipe, such as reduced rounds, duplicates, and those of earlier
        campaigns."""
        shown = {
            id(content)
            for recipe in self.recipes
            for by_seed in self.found(recipe).values()
            for content in by_seed.values()
        }
        return [path for path, content in self.results.items() if id(content) not in shown]


def check_frozen(campaign: str, found: dict[Path, dict[str, Any]]) -> None:
    """Raise an error if a recipe changed during a campaign."""
    hashes: dict[str, str | None] = {}
    for path, content in found.items():
        commit, own = content.get("recipe_commit"), content.get("recipe_hash")
        if not commit or commit.endswith("+"):
            raise CoterieError(f"{path}: its recipe was not committed; run campaigns with committed recipes")
        if hashes.setdefault(content["recipe"], own) != own:
            raise CoterieError(
                f"{path}: recipe {content['recipe']} of commit {commit} is not the one of the other results of "
                f"campaign {campaign}; start another campaign"
            )


def kind(settings: dict[str, Any]) -> str:
    """Dataset and method, an index: the results of a plan are all of one kind."""
    method = settings.get("method")
    return f"{settings.get('dataset')}, {method.get('name') if isinstance(method, dict) else method}"


def early(path: Path, content: dict[str, Any]) -> Early:
    try:
        found = Early({c["method"]: as_result(content, c) for c in content["cells"]}, content.get("rows", {}))
        for rows in found.rows.values():
            for name, (method, point) in rows.items():
                if point not in found.trainings[method]["history"]:
                    raise CoterieError(f"rows: {name}: {method} was not measured at {point}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CoterieError(f"{path}: not a table of runs: {error!r}") from None
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from None
    return found


def as_result(about: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Convert a run to the format of results. Its curves are percentages with two digits, its last values exact."""
    ends = {point: [*(a / 100 for a in cell["curves"].get(point, [])[:-1]), end] for point, end in cell["last"].items()}
    if not all(0 <= share <= 1 and math.isfinite(share) for curve in ends.values() for share in curve):
        raise CoterieError(f"{cell['method']} has accuracies that are not between 0 and 1")
    return {
        **{name: cell[name] for name in ("method", "seed", "commit", "seconds")},
        "date": about["date"],
        "early": True,
        "campaign": FIRST,
        "precision": "not recorded",
        "partition": about["partition"],
        "hardware": {"machine": about["machine"]},
        "libraries": {"torch": about["torch"], "python": about["python"]},
        "history": {point: {"clients": curve} for point, curve in ends.items()},
        "last": {},
    }
