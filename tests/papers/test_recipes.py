"""All recipes that come with Coterie: they are read, their parts exist, and what they ask for is measured."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from coterie.api import VARY, Execution, run
from coterie.api.protocols import preset
from coterie.core.training import LocalTraining
from coterie.data import PARTITIONS, Labels
from coterie.methods import METHODS
from coterie.models import build
from coterie.papers.recipes import RECIPES, Plan, Recipe, find, recipes
from coterie.papers.recipes.inferences import shared
from coterie.papers.recipes.reading import SETTING_KINDS
from coterie.papers.recipes.recipe import AVERAGES, SIZES
from coterie.papers.results import describe, outcome
from tests import toy

EVERY = recipes()
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "emnist": (1, 28, 28)}
CLASSES = {"cifar100": 100, "emnist": 62}
TAKES = {name for rule in PARTITIONS.values() for name in inspect.signature(rule).parameters}


def plans(recipe: Recipe) -> list[Plan]:
    return [recipe.plan(row, value) for row in recipe.rows for value in recipe.values]


def test_there_is_one_for_every_table_and_figure() -> None:
    assert len(EVERY) == len(list(RECIPES.glob("*/*.yaml"))) == 90 + 1  # and the demo
    assert Counter(r.id[:2] for r in EVERY) == {"P0": 6, "P1": 33, "P2": 19, "P3": 21, "P4": 11, "de": 1}
    names = [name for r in EVERY for name in (r.id, *r.also)]
    assert len(names) == len(set(names))


def test_numbers_as_printed() -> None:
    """A few of each paper, typed from its tables."""
    printed = {
        ("P1-T1-CIFAR10-20", "FedPAC"): 81.13,
        ("P1-T4-EMNIST-100", "HypCluster (k=3)"): 87.68,
        ("P1-T2-CINIC10", "w/ CC"): 70.84,
        ("P1-T8-CIFAR10", "Local-only"): 34.68,
        ("P0-T1-CIFAR10-100", "Modify"): 78.55,
        ("P3-T1-CIFAR10-0.1", "FedPer"): 12.57,
        ("P3-T2-1", "FedRep"): 31.31,
        ("P4-T1-CIFAR100-E20", "PFAKD"): 49.94,
        ("P4-T2-CIFAR100-E20", "PFAKD+AT"): 50.10,
    }
    for (name, row), number in printed.items():
        assert next(r for r in find(name).rows if r.name == row).published[()]["accuracy"].mean == number
    both = find("P2-T3-500").rows[-1].published[()]
    assert (both["G"].mean, both["P"].mean) == (54.42, 87.77)
    swept = find("P3-T3-IID").rows[0].published
    assert [swept[(("inertia", tau),)]["accuracy"].mean for tau in (0.99, 0.2)] == [76.41, 75.82]


def test_numbers_of_tables_that_repeat_each_other() -> None:
    """FedPAC's own number is in four tables; FedReG's columns of 100 clients are in two."""
    for dataset in ("FMNIST", "CIFAR10"):
        own = [find(f"P1-{t}-{dataset}{more}").rows[-1] for t, more in (("T1", "-20"), ("T2", ""), ("T5", ""))]
        assert len({row.published[()]["accuracy"].mean for row in own}) == 1
    third, fourth = find("P2-T3-100").rows, find("P2-T4-CIFAR10-0.1").rows
    differ = [a.name for a, b in zip(third, fourth, strict=True) if a.published != b.published]
    assert differ == ["GPFL"]  # a slip of the paper, which the recipes say


def test_all_readings_name_cells_that_exist() -> None:
    known = {(recipe.id, row.name) for recipe in EVERY for row in recipe.rows if row.published}
    used = {cell for recipe in EVERY for row in recipe.rows for cell in row.reading.fitted_on}
    assert used <= known
    assert {inference.name for r in EVERY for row in r.rows for inference in row.reading.inferences} == set(shared())
    for recipe in EVERY:
        for name, rows in recipe.copies.items():
            assert set(rows) <= {row.name for row in find(name).rows}
        for row in recipe.rows:
            if row.repeats:
                assert row.published in [other.published for other in find(row.repeats).rows if other.name == row.name]


def test_random_partitions_vary_with_the_seed_unless_the_authors_seed_is_known() -> None:
    for recipe in EVERY:
        if recipe.rows and recipe.plan(recipe.rows[0], recipe.values[0]).drawn:
            assert recipe.partition["seed"] == VARY, recipe.id
        if recipe.protocol == "akd":
            assert (recipe.partition["rule"], recipe.partition["seed"]) == ("dirichlet-pfllib", 42), recipe.id


def test_a_row_that_repeats_another_is_the_same_training_but_for_its_epochs() -> None:
    for recipe in EVERY:
        for row in recipe.rows:
            if row.repeats:
                (other,) = (r for r in find(row.repeats).rows if r.name == row.name)
                here, there = recipe.plan(row, ()), find(row.repeats).plan(other, ())
                assert (here.rule, here.partition, here.model) == (there.rule, there.partition, there.model)


def test_notes_name_settings_that_exist() -> None:
    known = SETTING_KINDS.keys() | {f.name for method in METHODS.values() for f in fields(method)}
    for recipe in EVERY:
        named = re.findall(r"`(\w+): ", " ".join(recipe.notes))
        assert set(named) <= known, recipe.id
        told = dict(re.findall(r"`(\w+): (\w+)`", " ".join(recipe.notes)))
        assert all(value in ("true", "false") for name, value in told.items() if SETTING_KINDS.get(name) is bool)


def flat(plan: Plan) -> dict[str, Any]:
    """The settings of method, local training and federation, and the model."""
    settings = plan.settings
    method = dict(settings["method"])
    return {**method.pop("train"), **method, **settings["federation"], "model": plan.model}


@pytest.mark.parametrize("recipe", EVERY, ids=lambda r: r.id)
def test_settings_are_the_protocols_or_a_reason_is_given(recipe: Recipe) -> None:
    """Of all that is trained: exactly the settings that differ from the protocol are named, each with a reason."""
    kept = ("model", *TAKES)
    cases = tuple(replace(case, set={n: v for n, v in case.set.items() if n in kept}) for case in recipe.cases)
    bare = replace(recipe, settings={}, cases=cases)
    differ = {
        name
        for row in recipe.rows
        for value in recipe.values
        for own, usual in [(recipe.plan(row, value), bare.plan(replace(row, settings={}, cases=()), value))]
        for name, setting in flat(own).items()
        if setting != flat(usual)[name]
    }
    parts = [recipe.settings, *(c.set for c in recipe.cases)]
    parts += [s for row in recipe.rows for s in (row.settings, *(c.set for c in row.cases))]
    written = {name for settings in parts for name in settings} - {*kept, *recipe.vary}
    assert written == set(recipe.differs)
    assert differ | {"full_last_round"} == written | {"full_last_round"}  # which follows from the share of clients


@pytest.mark.parametrize("recipe", EVERY, ids=lambda r: r.id)
def test_models_and_smallest_clients_are_the_protocols(recipe: Recipe) -> None:
    for plan in plans(recipe):
        usual = preset(recipe.protocol, plan.dataset, num_clients=plan.clients)
        assert plan.model == usual["model"]
        if "min_size" in usual:
            assert plan.partition["min_size"] == usual["min_size"]
        assert plan.federation.full_last_round or recipe.protocol != "pac" or plan.federation.join_ratio == 1


@pytest.mark.parametrize("recipe", EVERY, ids=lambda r: r.id)
def test_partitions_can_be_made(recipe: Recipe) -> None:
    """On invented labels, as many as the dataset has; and the estimate of a client's samples is near."""
    for plan in {(p.dataset, str(p.partition)): p for p in plans(recipe)}.values():
        classes = CLASSES.get(plan.dataset, 10)
        train, test = (np.arange(size) % classes for size in SIZES[plan.dataset])
        settings = {k: 0 if v == VARY else v for k, v in plan.partition.items()}
        made = PARTITIONS[plan.rule](Labels(plan.dataset, train, test, ("",) * classes), **settings)
        sizes = [len(part) for part in made.train]
        assert len(sizes) == plan.clients
        assert np.mean(sizes) == pytest.approx(plan.samples, rel=0.05)
        assert not plan.method.train.drop_last or min(sizes) >= plan.method.train.batch_size


def test_models_fit_the_datasets() -> None:
    for model, dataset in {(p.model, p.dataset) for r in EVERY for p in plans(r)}:
        assert build(model, SHAPES.get(dataset, (3, 32, 32)), CLASSES.get(dataset, 10), 0)


def test_everything_that_is_reported_is_measured() -> None:
    """Every distinct way to set a method, once on toy data: the history has all points its rows are read at."""
    torch.set_num_threads(1)
    trained: dict[Any, Any] = {}
    data = toy.toy(augmented=False)
    for recipe in EVERY:
        for row in recipe.rows:
            plan = recipe.plan(row, recipe.values[0])
            wanted = tuple(recipe.point(row, measure) for measure in recipe.measures)
            own = replace(plan.method, train=LocalTraining(local_epochs=1, batch_size=8, lr=0.01))
            federation = replace(plan.federation, rounds=1, join_ratio=0.6 if plan.federation.join_ratio < 1 else 1.0)
            switches = tuple(v for f in fields(own) if isinstance(v := getattr(own, f.name), bool | str))
            alike = (
                type(own),
                switches,
                federation.join_ratio,
                federation.full_last_round,
                federation.new_clients,
            )
            if alike not in trained:
                settings = {f.name: getattr(federation, f.name) for f in fields(federation)}
                result = run(own, data, toy.network(), backend=Execution(processes=1), **settings)
                trained[alike] = describe(result, plan, 0, 1.0, "abc")
            content = trained[alike]
            for point in wanted:
                for average in AVERAGES:
                    assert outcome(content, point, recipe.report, average) is not None, (recipe.id, row.name, point)


def test_work_by_hand() -> None:
    """Rounds x participants x steps of a client."""
    assert find("P1-T2-FMNIST").work == 4 * 200 * 20 * (5 * 12)
    hundred = find("P1-T1-CIFAR10-100")
    assert hundred.plan(hundred.rows[0], ()).work == (200 * 30 + 100) * (5 * 12)
    merged = find("P4-T1-CIFAR10-E5")  # 4,500 samples on average: 35 whole batches of 128
    assert merged.plan(merged.rows[0], ()).work == 100 * 10 * (5 * 35)
    newcomers = find("P3-T2-0.1")  # 6 of 60, 480 samples each
    assert newcomers.plan(newcomers.rows[0], ()).work == 100 * 6 * (5 * 10)


def test_rows_of_one_training_share_it() -> None:
    recipe = find("P1-T1-FMNIST-20")
    trained = {recipe.plan(row, ()).hash for row in recipe.rows}
    assert len(recipe.rows) - len(trained) == 3  # FedAvg-FT, and FedEM-FT twice
    other = find("P1-T2-FMNIST")
    assert other.plan(other.rows[-1], ()).hash in trained  # Both is FedPAC


def test_what_decides_about_a_result_is_in_the_hash() -> None:
    recipe = find("P1-F1a")
    row = recipe.rows[0]
    first, second = (recipe.plan(row, value) for value in recipe.values[:2])
    assert first.hash != second.hash
    assert first.hash != recipe.plan(row, recipe.values[0], rounds=3).hash
    assert first.hash == recipe.plan(row, recipe.values[0], rounds=200).hash
