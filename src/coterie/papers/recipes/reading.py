"""Reads recipes from YAML files. Errors name the file and the key."""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from coterie.analysis.lookup import method_class
from coterie.api import VARY, method_name
from coterie.api.protocols import PROTOCOLS
from coterie.core.errors import CoterieError, unknown
from coterie.core.training import LocalTraining
from coterie.core.validation import MappingReader, fitting, read_yaml
from coterie.data import DATASETS, PARTITIONS
from coterie.federation import Settings
from coterie.federation.history import POINTS
from coterie.models import MODELS
from coterie.papers.recipes.inferences import Inferences, read_inferences, read_reading, shared
from coterie.papers.recipes.published import read_published
from coterie.papers.recipes.recipe import (
    AVERAGES,
    PERSONAL,
    REPORTS,
    ROUNDS,
    WEIGHTS,
    Recipe,
    RecipeRow,
    SettingsCase,
)

RECIPES = Path(__file__).parent
MOST_TRAININGS = 10_000
READ_AT = {**POINTS, "last_trained": "personal models as each client last trained them"}
SETTING_KINDS = {
    f.name: kind for t in (Settings, LocalTraining) for f in fields(t) for kind in [typing.get_type_hints(t)[f.name]]
}


@cache
def recipes() -> tuple[Recipe, ...]:
    """All recipes of this package, by paper."""
    return tuple(read_recipe(path) for path in sorted(RECIPES.glob("*/*.yaml"), key=lambda path: natural(path.stem)))


def natural(name: str) -> list[tuple[bool, float, str]]:
    """P1-T2 before P1-T10."""
    words = "".join(c if c.isdigit() or c == "." else f" {c} " for c in name).split()
    return [(True, float(w), "") if w[0].isdigit() else (False, 0.0, w) for w in words]


def find(name: str) -> Recipe:
    """A recipe by one of its names, or from a file."""
    if name.endswith((".yaml", ".yml")):
        return read_recipe(Path(name))
    for path in RECIPES.glob("*/*.yaml"):
        if path.stem.lower() == name.lower():
            return read_recipe(path)
    known = {other: recipe for recipe in recipes() for other in (recipe.id, *recipe.also)}
    for other, recipe in known.items():
        if other.lower() == name.lower():
            return recipe
    near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`coterie recipes` lists them"
    raise CoterieError(f"unknown recipe '{name}': {hint}")


def read_recipe(path: Path) -> Recipe:
    return replace(read_yaml(path, lambda document: parse(document, path.stem)), path=path)


def parse(document: Any, stem: str) -> Recipe:
    top = MappingReader("", document)
    rule, partition = read_partition(top.take("partition", dict))
    instead = top.take("instead", str, None)
    settings = read_settings("settings: ", top.take("settings", dict, {}), SETTING_KINDS)
    kinds = {**SETTING_KINDS, **rule_kinds(rule), "dataset": str, "model": str}
    for row in fitting("rows", top.left.get("rows", []), list):
        kinds |= method_kinds(row.get("method") if isinstance(row, dict) else None)
    vary = read_vary(top.take("vary", dict, {}), kinds)
    measures = read_measures(top.take("measures", dict, {"accuracy": PERSONAL}))
    inferences = shared() | read_inferences("inferences: ", top.take("inferences", dict, {}))
    rows = [
        read_row(f"rows[{i}].", row, vary, measures, kinds, inferences) for i, row in enumerate(top.take("rows", list))
    ]
    names = [row.name for row in rows]
    records = read_records(top.take("records", dict, {}))
    found = Recipe(
        id=top.take("id", str),
        also=tuple(texts("also", top.take("also", list, []))),
        paper=top.take("paper", str),
        place=top.take("place", str),
        protocol=top.name("protocol", PROTOCOLS),
        dataset=top.name("dataset", DATASETS),
        partition={"rule": rule, **partition},
        model=top.name("model", MODELS),
        settings=settings,
        differs=read_differs(top.take("differs", dict, {}), kinds),
        vary=vary,
        cases=read_cases("cases", top.take("cases", list, []), vary, kinds),
        report=top.name("report", REPORTS),
        averages=read_averages(top, measures),
        measures=measures,
        records=records,
        groups=top.take("groups", int, 1),
        figure=read_figure(top, vary, records),
        joint=top.take("joint", bool, False),
        rows=tuple(rows),
        against=top.name("against", names, names[-1] if names else ""),  # papers list their own method last
        rivals=tuple(texts("rivals", top.take("rivals", list, []))),
        headlines={n: tuple(texts(f"headlines: {n}", r)) for n, r in top.take("headlines", dict, {}).items()},
        instead=instead,
        notes=tuple(texts("notes", top.take("notes", list, []))),
        copies={name: tuple(texts(f"copies: {name}", rows)) for name, rows in top.take("copies", dict, {}).items()},
    )
    top.close()
    if found.id != stem:
        raise CoterieError(f"id is '{found.id}', but the file is named {stem}")
    check_rows(found)
    return found


def check_rows(recipe: Recipe) -> None:
    for name, count in Counter(row.name for row in recipe.rows).most_common(1):
        if count > 1:
            raise CoterieError(f"rows: duplicate name '{name}'")
    for where, wanted in {"rivals": recipe.rivals, "headlines": recipe.headlines, **recipe.headlines}.items():
        for name in wanted:
            if name not in [row.name for row in recipe.rows]:
                raise unknown(where, name, [row.name for row in recipe.rows])
    trainings = len(recipe.rows) * math.prod(len(values) for values in recipe.vary.values())
    if trainings > MOST_TRAININGS:
        raise CoterieError(f"rows and vary make {trainings:,} trainings; a recipe has at most {MOST_TRAININGS:,}")
    if not recipe.rows and recipe.instead is None:
        raise CoterieError("rows is empty: add rows, or describe how to produce it in `instead`")
    for row in recipe.rows:
        for value in recipe.values:
            try:
                plan = recipe.plan(row, value)
                if plan.model not in MODELS:
                    raise unknown("model", plan.model, MODELS)
            except CoterieError as error:
                raise CoterieError(f"row {row.name}: {error}") from None


def read_partition(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    keys = MappingReader("partition: ", content)
    rule = keys.name("rule", PARTITIONS)
    kinds = rule_kinds(rule)
    varies = "seed" in kinds and keys.left.get("seed") == VARY
    settings = {
        name: keys.take(name, str if varies and name == "seed" else kind)
        for name, kind in kinds.items()
        if name in keys.left
    }
    keys.known += kinds
    keys.close()
    return rule, settings


def rule_kinds(rule: str) -> dict[str, Any]:
    hints = typing.get_type_hints(PARTITIONS[rule])
    return {name: hints[name] for name in inspect.signature(PARTITIONS[rule]).parameters if name != "labels"}


def method_kinds(name: Any) -> dict[str, Any]:
    """Setting -> type, of a method; empty if the name is not a string."""
    if not isinstance(name, str):
        return {}
    kind = method_class(method_name(name))
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.name != "train"}


def read_settings(where: str, content: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    keys, of_a_run = MappingReader(where, content), ("seed", "evaluate_every")
    for name in of_a_run:
        if name in content:
            raise CoterieError(f"{where}{name} is a setting of a run, not of a recipe; remove it")
    found = {name: keys.take(name, kind) for name, kind in kinds.items() if name in keys.left}
    keys.known += [name for name in kinds if name not in of_a_run]
    keys.close()
    return found


def read_differs(content: dict[str, Any], kinds: dict[str, Any]) -> dict[str, str]:
    """Setting -> why it differs from the protocol."""
    for name, why in content.items():
        if name not in kinds:
            raise unknown("key in differs", name, kinds)
        if not isinstance(why, str) or not why.strip():
            raise CoterieError(f"differs: {name} must say in words why it differs from the protocol")
    return dict(content)


def read_vary(content: dict[str, Any], kinds: dict[str, Any]) -> dict[str, list[Any]]:
    for name, values in content.items():
        if not isinstance(values, list) or not values:
            raise CoterieError(f"vary: {name} must be a list of values, got {values!r:.60}")
    return {
        name: [read_settings("vary: ", {name: value}, kinds)[name] for value in values]
        for name, values in content.items()
    }


def read_cases(where: str, content: list[Any], vary: dict[str, Any], kinds: dict[str, Any]) -> tuple[SettingsCase, ...]:
    cases = []
    for number, case in enumerate(content):
        keys = MappingReader(f"{where}[{number}].", case)
        when = read_settings(f"{where}[{number}].when: ", keys.take("when", dict), {n: kinds[n] for n in vary})
        cases.append(SettingsCase(when, read_settings(f"{where}[{number}].set: ", keys.take("set", dict), kinds)))
        keys.close()
    return tuple(cases)


def read_measures(content: dict[str, Any]) -> dict[str, str]:
    keys = MappingReader("measures: ", content)
    if not content:
        raise CoterieError("measures is empty")
    return {name: keys.name(name, {PERSONAL, *READ_AT}) for name in content}


def read_averages(top: MappingReader, measures: dict[str, str]) -> dict[str, str]:
    """One for all measures, or one for each."""
    if not isinstance(top.left.get("average"), dict):
        return dict.fromkeys(measures, top.name("average", AVERAGES))
    keys = MappingReader("average: ", top.take("average", dict))
    found = {measure: keys.name(measure, AVERAGES) for measure in measures}
    keys.close()
    return found


def read_records(content: dict[str, Any]) -> dict[str, list[int]]:
    keys = MappingReader("records: ", content)
    return {name: [fitting(f"records: {name}", n, int) for n in keys.take(name, list)] for name in content}


def read_figure(top: MappingReader, vary: dict[str, list[Any]], records: dict[str, list[int]]) -> str | None:
    name: str | None = top.name("figure", {ROUNDS, *vary, *({WEIGHTS} & records.keys())}, None)
    if name in vary and not all(isinstance(v, int | float) and not isinstance(v, bool) for v in vary[name]):
        raise CoterieError(f"figure: the values of {name} are not numbers")
    return name


def texts(where: str, content: list[Any]) -> list[str]:
    return [fitting(where, text, str) for text in content]


def read_row(
    where: str,
    content: Any,
    vary: dict[str, Any],
    measures: dict[str, str],
    kinds: dict[str, Any],
    inferences: Inferences,
) -> RecipeRow:
    keys = MappingReader(where, content)
    name = keys.take("name", str)
    keys.where = f"row {name}: "
    method = method_name(keys.take("method", str))
    own = SETTING_KINDS | method_kinds(method)
    usual = () if "published" in keys.left else ("default",)
    row = RecipeRow(
        name,
        method,
        read_reading(f"row {name}: reading", keys.take("reading", object, *usual), inferences),
        read_settings(f"row {name}: settings: ", keys.take("settings", dict, {}), own),
        keys.name("read", READ_AT, None),
        read_cases(f"row {name}: cases", keys.take("cases", list, []), vary, kinds | own),
        read_published(f"row {name}: published", keys.take("published", object, None), vary, measures),
        keys.take("repeats", str, None),
    )
    keys.close()
    return row
