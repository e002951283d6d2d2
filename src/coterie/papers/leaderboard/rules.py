"""The rules of a leaderboard, read from a YAML file: benchmarks, budget, search spaces and seeds."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from coterie.analysis.lookup import method_class, method_name, parts
from coterie.analysis.outcomes import title
from coterie.api import VARY, make_method
from coterie.api.variations import Candidate
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import AnyMethod
from coterie.core.validation import MappingReader, fitting, read_yaml
from coterie.data import PARTITIONS
from coterie.methods import METHODS
from coterie.papers.recipes import Plan, Recipe, RecipeRow
from coterie.papers.recipes.reading import parse
from coterie.tuning.space import Space, Span, draws, read_space

OWN = Path(__file__).parent / "rules.yaml"
BASE = "quick"  # methods have their own papers' defaults there; a benchmark sets everything else
WIDE = 10.0  # a number without a declared space is searched from its default / WIDE to its default * WIDE
ALL = "all"


@dataclass(frozen=True)
class Benchmark:
    """A dataset, divided among clients, a network, and how it is trained."""

    id: str
    recipe: Recipe  # without rows
    definition: dict[str, Any]  # as in the file, with the settings of all benchmarks

    @property
    def draws(self) -> bool:
        """Whether every seed draws its own partition."""
        return self.recipe.partition.get("seed") == VARY

    @property
    def text(self) -> str:
        """Such as: cifar10, dirichlet-pac (num_clients 20, alpha 0.1), cnn, 50 rounds."""
        listed = ((k, v) for k, v in self.definition["partition"].items() if k != "rule")
        inner = ", ".join(f"{k} {', '.join(map(str, v)) if isinstance(v, list) else v}" for k, v in listed)
        rule = self.definition["partition"]["rule"] + (f" ({inner})" if inner else "")
        settings = ", ".join(f"{k} {v}" for k, v in self.definition["settings"].items() if k != "lr")
        return f"{self.recipe.dataset}, {rule}, {self.recipe.model}, {settings}"

    def plan(self, method: str, settings: Candidate) -> Plan:
        """A training; only its last round is measured."""
        row = replace(row_of(method), settings=settings)
        plan = self.recipe.plan(row, ())
        return replace(plan, federation=replace(plan.federation, evaluate_every=plan.federation.rounds))


@dataclass(frozen=True)
class BoardRules:
    version: int
    trials: int  # settings that every method tries on every benchmark
    search_seed: int
    tuning_seed: int
    validation: float
    seeds: tuple[int, ...]
    methods: tuple[str, ...]  # run by default
    space: dict[str, Any]  # for all methods
    spaces: dict[str, dict[str, Any]]  # method -> its own settings
    sets: dict[str, tuple[str, ...]]  # name -> benchmarks
    benchmarks: tuple[Benchmark, ...]

    def chosen(self, names: Sequence[str] | None) -> list[Benchmark]:
        """Benchmarks by their names or the names of sets, in the order of the file; default: the first set."""
        known = {benchmark.id: benchmark for benchmark in self.benchmarks}
        groups = {**self.sets, ALL: tuple(known)}
        wanted: set[str] = set()
        for name in names if names is not None else [next(iter(groups))]:
            if name not in known and name not in groups:
                raise unknown("benchmark", name, [*known, *groups])
            wanted |= set(groups.get(name, (name,)))
        return [benchmark for benchmark in self.benchmarks if benchmark.id in wanted]

    def chosen_methods(self, names: Sequence[str] | None) -> list[str]:
        """Methods by their names; all: every method of Coterie; default: those of the rules."""
        found = list(METHODS) if names and ALL in names else [method_name(n) for n in names or self.methods]
        return list(dict.fromkeys(found))

    def chosen_seeds(self, seeds: Sequence[int] | None) -> list[int]:
        for seed in seeds or ():
            if seed not in self.seeds:
                listed = ", ".join(map(str, self.seeds))
                raise CoterieError(f"--seeds: {seed} is not among the seeds of the rules, {listed}")
        return [seed for seed in self.seeds if seeds is None or seed in seeds]

    def space_of(self, method: str) -> Space:
        """The search space of a method."""
        declared = self.spaces.get(method)
        own = derived(make_method(method)) if declared is None else declared
        fixed = parts(method)[1]
        texts = {name: values for name, values in {**self.space, **own}.items() if name not in fixed}
        return read_space(title(method), method_class(method), texts)

    def candidates(self, benchmark: Benchmark, method: str) -> list[Candidate]:
        """The settings that a method tries: its defaults first, then as many random ones as the budget has left."""
        space, plan = self.space_of(method), benchmark.plan(method, {})
        own = {f.name for f in fields(plan.method)}
        first = {name: getattr(plan.method if name in own else plan.method.train, name) for name in space}
        drawn = [candidate for candidate in draws(space, self.trials, self.search_seed) if candidate != first]
        found = [first, *drawn][: self.trials]
        if len(found) < self.trials:
            raise CoterieError(
                f"{title(method)} has only {len(found)} different settings to try, and the budget is {self.trials} "
                "for every method; widen its space"
            )
        return found

    def hash(self, benchmark: Benchmark, method: str) -> str:
        """What results of a cell have in common: files with another one belong to other rules."""
        about = {
            "version": self.version,
            "budget": [self.trials, self.search_seed, self.tuning_seed, self.validation],
            "benchmark": benchmark.definition,
            "space": {name: list(values) for name, values in self.space_of(method).items()},
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def derived(method: AnyMethod) -> dict[str, str]:
    """The space of a method that declares none: its own positive numbers, around their defaults."""
    found = {}
    for field in fields(method):
        value, limits = getattr(method, field.name), field.metadata
        if not isinstance(value, float) or value <= 0:
            continue
        high = min(WIDE * value, limits.get("high", WIDE * value))
        high = min(high, limits["below"] * 0.99) if "below" in limits else high
        low = max(value / WIDE, limits.get("low", 0.0))
        if low < high:
            found[field.name] = f"{low:.4g}..{high:.4g}"
    return found


@cache
def row_of(method: str) -> RecipeRow:
    """A row of a table for this method, without published numbers."""
    return recipe_of({"rows": [{"name": title(method), "method": method}]}).rows[0]


def recipe_of(changes: dict[str, Any], name: str = "leaderboard") -> Recipe:
    """A recipe of Coterie's own; its rows do not matter where a benchmark is read."""
    usual = {
        "id": name,
        "paper": "Coterie",
        "place": "leaderboard",
        "protocol": BASE,
        "dataset": "fashion-mnist-small",
        "partition": {"rule": "iid"},
        "model": "mlp",
        "report": "last",
        "average": "clients",
        "rows": [{"name": "FedAvg", "method": "fedavg"}],
    }
    return parse({**usual, **changes}, name)


def read_rules(path: Path = OWN) -> BoardRules:
    return read_yaml(path, parsed)


def parsed(document: Any) -> BoardRules:
    top = MappingReader("", document)
    usual = top.take("settings", dict, {})
    benchmarks = tuple(
        read_benchmark(f"benchmarks[{i}].", content, usual) for i, content in enumerate(top.take("benchmarks", list))
    )
    names = [benchmark.id for benchmark in benchmarks]
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise CoterieError(f"benchmarks: duplicate id '{name}'")
    sets = {name: fitting(f"sets: {name}", own, tuple[str, ...]) for name, own in top.take("sets", dict, {}).items()}
    for key, listed in sets.items():
        for name in listed:
            if name not in names:
                raise unknown(f"benchmark in sets: {key}", name, names)
    spaces = top.take("spaces", dict, {})
    found = BoardRules(
        version=top.take("version", int),
        trials=top.take("trials", int),
        search_seed=top.take("search_seed", int, 0),
        tuning_seed=top.take("tuning_seed", int),
        validation=top.take("validation", float),
        seeds=top.take("seeds", tuple[int, ...]),
        methods=tuple(method_name(name) for name in top.take("methods", tuple[str, ...])),
        space=top.take("space", dict),
        spaces={method_name(name): fitting(f"spaces: {name}", own, dict) for name, own in spaces.items()},
        sets=sets,
        benchmarks=benchmarks,
    )
    top.close()
    check(found)
    return found


def check(rules: BoardRules) -> None:
    if not rules.benchmarks or not rules.seeds or not rules.methods:
        raise CoterieError("benchmarks, methods and seeds must not be empty")
    if rules.trials < 1:
        raise CoterieError(f"trials must be at least 1, got {rules.trials}")
    if not 0 < rules.validation < 1:
        raise CoterieError(f"validation must be between 0 and 1, got {rules.validation}")
    if rules.tuning_seed in rules.seeds or len(set(rules.seeds)) < len(rules.seeds):
        raise CoterieError("tuning_seed and seeds must all be different, or results would be measured on tuned data")
    if min(*rules.seeds, rules.tuning_seed) < 0:
        raise CoterieError("seeds must not be negative")
    for method in rules.spaces:
        rules.space_of(method)


def read_benchmark(where: str, content: Any, usual: dict[str, Any]) -> Benchmark:
    keys = MappingReader(where, content)
    name = keys.take("id", str)
    keys.where = f"{name}: "
    partition = keys.take("partition", dict)
    rule = partition.get("rule")
    if "seed" in partition:
        raise CoterieError(f"{name}: partition: seed: every seed draws its own partition; remove it")
    definition = {
        "dataset": keys.take("dataset", str),
        "partition": partition,
        "model": keys.take("model", str),
        "settings": {**usual, **keys.take("settings", dict, {})},
    }
    keys.close()
    drawn = rule in PARTITIONS and "seed" in inspect.signature(PARTITIONS[rule]).parameters
    varied = {**partition, "seed": VARY} if drawn else partition
    try:
        recipe = recipe_of({**definition, "partition": varied}, name)
    except CoterieError as error:
        raise CoterieError(f"{name}: {error}") from None
    return Benchmark(name, recipe, definition)


def own_range(values: list[Any] | Span) -> str:
    """A space in words, such as: 0.01 to 1, or: 1, 2, 5."""
    if isinstance(values, Span):
        return f"{values.low:g} to {values.high:g}"
    return ", ".join(map(str, values))
