"""Recipes and their trainings."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie.analysis.lookup import method_class, training
from coterie.api import VARY, About, federate, make_method, resolve
from coterie.api.protocols import preset
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.data import PARTITIONS, transform
from coterie.federation import Settings
from coterie.methods import VARIANTS
from coterie.papers.recipes.inferences import RowReading

Value = tuple[tuple[str, Any], ...]  # one choice of the settings that vary: ((setting, value), ...)

PERSONAL = "personal"  # measured at the point that the method's paper uses
ROUNDS, WEIGHTS = "rounds", "head_weights"  # figures: curves over rounds; heat maps of head weights
REPORTS = {  # rounds that are reported
    "last": "of the last round",
    "best": "of the best round",
    "best of every tenth": "of the best among every tenth round",
    "mean of last 10": "mean of the last ten rounds",
}
AVERAGES = ("clients", "samples")  # what has equal weight in the mean
FEDERATION = {field.name for field in fields(Settings)} - {"seed", "evaluate_every"}

SIZES = {  # samples of the official train and test split
    "fashion-mnist-small": (9_000, 2_250),
    "heart-disease": (693, 227),
    "fashion-mnist": (60_000, 10_000),
    "mnist": (60_000, 10_000),
    "emnist": (697_932, 116_323),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "cinic10": (90_000, 90_000),
}
OWNERS = {"heart-disease": 4}  # natural number of clients


@dataclass(frozen=True)
class Published:
    """Percent, as printed."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class SettingsCase:
    """Settings for some of the values that vary."""

    when: dict[str, Any]
    set: dict[str, Any]

    def fits(self, value: Value) -> bool:
        chosen = dict(value)
        return all(chosen[name] == wanted for name, wanted in self.when.items())


@dataclass(frozen=True)
class RecipeRow:
    """One line of a table: a method, how it is set, and its numbers."""

    name: str  # as the paper prints it
    method: str
    reading: RowReading  # where its settings come from
    settings: dict[str, Any]  # of the method, its training or the federation, overriding the recipe's
    read: str | None  # point of measurement; None: the method's
    cases: tuple[SettingsCase, ...]
    published: dict[Value, dict[str, Published]]  # value -> measure -> number
    repeats: str | None  # the recipe that already has these numbers, which the paper prints once for both

    @property
    def point(self) -> str:
        """Point at which its personal model is measured."""
        base, changes, title = VARIANTS.get(self.method, (self.method, {}, ""))
        results = method_class(base).results
        named = results.get(title) if not changes else None  # a variant can be another result of the same training
        return self.read or named or next(iter(results.values()))

    @property
    def training(self) -> str:
        """The method that trains: several rows can be results of one training."""
        return training(self.method)


@dataclass(frozen=True)
class Plan:
    """One training: everything that determines its result, except the seed."""

    dataset: str
    transform: Transform
    rule: str
    partition: dict[str, Any]
    model: str
    method: AnyMethod
    federation: Settings
    records: dict[str, list[int]]

    @property
    def settings(self) -> dict[str, Any]:
        """The plan in plain values."""
        federation = {name: value for name, value in asdict(self.federation).items() if name != "seed"}
        return {
            "dataset": self.dataset,
            "transform": asdict(self.transform),
            "partition": {"rule": self.rule, **self.partition},
            "model": self.model,
            "method": {"name": type(self.method).__name__, **asdict(self.method)},
            "federation": federation,
            "records": self.records,
        }

    @property
    def usual(self) -> dict[str, Any]:
        """Default values of settings that a result may lack."""
        rule = inspect.signature(PARTITIONS[self.rule]).parameters.values()
        return {
            "transform": asdict(Transform()),
            "partition": {p.name: p.default for p in rule if p.default is not p.empty},
            "method": asdict(type(self.method)()),
            "federation": asdict(Settings()),
            "records": {},
        }

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()

    @property
    def drawn(self) -> bool:
        """Whether the partition is random. PFLlib's generator with a fixed seed makes its authors' very clients."""
        if self.rule == "dirichlet-pfllib" and self.partition.get("seed") != VARY:
            return False
        rule = inspect.signature(PARTITIONS[self.rule]).parameters.get("seed")
        return rule is not None and self.partition.get("seed", rule.default) is not None

    @property
    def clients(self) -> int:
        return clients_of(self.rule, self.partition, self.dataset)

    @property
    def work(self) -> int:
        """Approximate number of local steps over all rounds and participants; some methods take more."""
        train = self.method.train
        batches = self.samples / train.batch_size
        steps = train.local_epochs * max(int(batches) if train.drop_last else math.ceil(batches), 1)
        new = self.federation.new_clients
        members = self.clients - new.count(",") - 1 if isinstance(new, str) else round((1 - new) * self.clients)
        extra = members if self.federation.full_last_round and self.federation.join_ratio < 1 else 0
        return (self.federation.rounds * self.federation.joining(members) + extra) * steps

    @property
    def samples(self) -> float:
        """Average number of training samples per client."""
        if "sizes" in self.partition:
            return float(sum(self.partition["sizes"]) / len(self.partition["sizes"]))
        if "local_size" in self.partition:
            return float(self.partition["local_size"])
        train, test = SIZES[self.dataset]
        share = inspect.signature(PARTITIONS[self.rule]).parameters.get("train_share")  # of both splits together
        everything = train if share is None else self.partition.get("train_share", share.default) * (train + test)
        return float(everything) / self.clients


@dataclass(frozen=True)
class Recipe:
    id: str
    also: tuple[str, ...]  # aliases
    paper: str
    place: str  # table or figure
    protocol: str
    dataset: str
    partition: dict[str, Any]  # with the rule
    model: str
    settings: dict[str, Any]  # of the federation and of local training, overriding the protocol's
    differs: dict[str, str]  # setting that differs from the protocol -> reason
    vary: dict[str, list[Any]]
    cases: tuple[SettingsCase, ...]
    report: str
    averages: dict[str, str]  # measure -> what has equal weight in the mean
    measures: dict[str, str]  # name -> point, or PERSONAL
    records: dict[str, list[int]]  # name of a report -> rounds in which to store it
    groups: int  # client i belongs to group i % groups, in heat maps next to each other
    figure: str | None  # x axis: ROUNDS or a setting that varies; or WEIGHTS; None: a table
    joint: bool  # the figure shows the sum of log(10 accuracy) over all measures
    rows: tuple[RecipeRow, ...]
    against: str  # the row that the others are tested against
    rivals: tuple[str, ...]  # rows that the paper's headline compares it with; empty: all others
    headlines: dict[str, tuple[str, ...]]  # other rows that the paper claims to be ahead -> of which rows
    instead: str | None  # how to produce it, if not by training
    notes: tuple[str, ...]
    copies: dict[str, tuple[str, ...]]  # recipe -> its rows that this table prints again; they have no rows here
    path: Path | None = None  # the file

    @property
    def values(self) -> list[Value]:
        """All combinations of the settings that vary; one empty combination if there are none."""
        return [tuple(zip(self.vary, chosen, strict=True)) for chosen in itertools.product(*self.vary.values())]

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(self.vary.get("dataset", [self.dataset])))

    def with_partition_seed(self, seed: int | str | None) -> Recipe:
        """Change the seed of the partition; "vary": one partition per seed; None: no change."""
        if seed is None:
            return self
        rule = self.partition["rule"]
        if "seed" not in inspect.signature(PARTITIONS[rule]).parameters:
            raise CoterieError(f"{self.id}: its partition {rule} is not random, so --partition-seed has no effect")
        if not isinstance(seed, int) and seed != VARY:
            raise CoterieError(f"--partition-seed must be a whole number or vary, got {seed!r:.40}")
        return replace(self, partition={**self.partition, "seed": seed})

    def point(self, row: RecipeRow, measure: str) -> str:
        wanted = self.measures[measure]
        return row.point if wanted == PERSONAL else wanted

    def plan(self, row: RecipeRow, value: Value, rounds: int | None = None) -> Plan:
        """The training of a row at a value; settings default to the protocol's. rounds: if not the paper's."""
        chosen = {**self.settings, **matching(self.cases, value), **row.settings, **matching(row.cases, value)}
        chosen |= dict(value)
        dataset, model = chosen.pop("dataset", self.dataset), chosen.pop("model", self.model)
        rule = self.partition["rule"]
        takes = set(inspect.signature(PARTITIONS[rule]).parameters)
        partition = {k: v for k, v in {**self.partition, **chosen}.items() if k in takes}
        about = About(dataset, (), clients_of(rule, partition, dataset))
        usual = preset(self.protocol, *about)
        federation = federate({k: v for k, v in chosen.items() if k in FEDERATION}, usual)
        own = {k: v for k, v in chosen.items() if k not in FEDERATION | takes}
        if rounds is not None:
            federation = replace(federation, rounds=rounds)
        return Plan(
            dataset,
            transform(dataset, self.protocol),
            rule,
            partition,
            model,
            resolve(make_method(row.method, **own), self.protocol, about),
            federation,
            self.records,
        )

    @property
    def work(self) -> int:
        """Work of all trainings with one seed."""
        plans = {p.hash: p for row in self.rows for value in self.values for p in [self.plan(row, value)]}
        return sum(plan.work for plan in plans.values())


def clients_of(rule: str, partition: Mapping[str, Any], dataset: str) -> int:
    """Number of clients of a partition."""
    usual = inspect.signature(PARTITIONS[rule]).parameters.get("num_clients")
    return int(partition.get("num_clients", usual.default if usual else OWNERS.get(dataset, 1)))


def matching(cases: tuple[SettingsCase, ...], value: Value) -> Mapping[str, Any]:
    return {name: setting for case in cases if case.fits(value) for name, setting in case.set.items()}
