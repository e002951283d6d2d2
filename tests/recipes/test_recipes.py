"""All recipes that come with Coterie: they are read, their parts exist, and what they ask for is measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from coterie.api import Execution, run
from coterie.core.local import Sgd
from coterie.data import PARTITIONS, Labels
from coterie.federation import Settings
from coterie.methods import METHODS
from coterie.models import build
from coterie.protocols import method_preset, preset
from coterie.recipes import RECIPES, Plan, Recipe, find, recipes
from coterie.recipes.recipe import AVERAGES, SIZES
from coterie.results import describe, outcome
from tests import toy

EVERY = recipes()
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "emnist": (1, 28, 28)}
CLASSES = {"cifar100": 100, "emnist": 62}


def plans(recipe: Recipe) -> list[Plan]:
    return [recipe.plan(row, value) for row in recipe.rows for value in recipe.values]


def test_there_is_one_for_every_table_and_figure() -> None:
    assert len(EVERY) == len(list(RECIPES.glob("*/*.yaml"))) == 89
    assert Counter(r.id[:2] for r in EVERY) == {"P0": 6, "P1": 33, "P2": 18, "P3": 21, "P4": 11}
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


@pytest.mark.parametrize("recipe", EVERY, ids=lambda r: r.id)
def test_settings_are_the_papers(recipe: Recipe) -> None:
    """What is common to all experiments of a paper is there twice, in its protocol and in its recipes."""
    for plan in plans(recipe):
        method = next(name for name, kind in METHODS.items() if kind is type(plan.method))
        usual = preset(recipe.protocol, plan.dataset) | method_preset(recipe.protocol, method)
        for name in ("lr", "momentum", "weight_decay", "drop_last", "keep"):
            default = {f.name: f.default for f in fields(Sgd)}[name]
            assert getattr(plan.method.train, name) == usual.get(name, default), (plan.dataset, name)
        for name in ("lr_decay", "lr_steps"):
            default = {f.name: f.default for f in fields(Settings)}[name]
            assert getattr(plan.federation, name) == usual.get(name, default)
        assert plan.model == usual["model"]
        assert plan.federation.full_last_round or recipe.protocol != "pac" or plan.federation.join_ratio == 1


@pytest.mark.parametrize("recipe", EVERY, ids=lambda r: r.id)
def test_partitions_can_be_made(recipe: Recipe) -> None:
    """On invented labels, as many as the dataset has; and the estimate of a client's samples is near."""
    for plan in {(p.dataset, str(p.partition)): p for p in plans(recipe)}.values():
        classes = CLASSES.get(plan.dataset, 10)
        train, test = (np.arange(size) % classes for size in SIZES[plan.dataset])
        made = PARTITIONS[plan.rule](Labels(plan.dataset, train, test, ("",) * classes), **plan.partition)
        sizes = [len(part) for part in made.train]
        assert len(sizes) == plan.clients
        assert np.mean(sizes) == pytest.approx(plan.samples, rel=0.05)
        assert not plan.method.train.drop_last or min(sizes) >= plan.method.train.batch


def test_models_fit_the_datasets() -> None:
    for model, dataset in {(p.model, p.dataset) for r in EVERY for p in plans(r)}:
        assert build(model, SHAPES.get(dataset, (3, 32, 32)), CLASSES.get(dataset, 10), 0)


def test_everything_that_is_reported_is_measured() -> None:
    """Every distinct way to set a method, once on toy data: the history has all points its rows are read at."""
    torch.set_num_threads(1)
    seen, data = set(), toy.toy(augmented=False)
    for recipe in EVERY:
        for row in recipe.rows:
            plan = recipe.plan(row, recipe.values[0])
            wanted = tuple(recipe.point(row, measure) for measure in recipe.measures)
            own = replace(plan.method, train=Sgd(epochs=1, batch=8, lr=0.01))
            federation = replace(plan.federation, rounds=1, join_ratio=0.6 if plan.federation.join_ratio < 1 else 1.0)
            switches = tuple(v for f in fields(own) if isinstance(v := getattr(own, f.name), bool | str))
            alike = (
                type(own),
                switches,
                federation.join_ratio,
                federation.full_last_round,
                federation.new_clients,
                wanted,
            )
            if alike in seen:
                continue
            seen.add(alike)
            settings = {f.name: getattr(federation, f.name) for f in fields(federation)}
            result = run(own, toy.network(), data, where=Execution(processes=1), **settings)
            content = describe(result, plan, 0, 1.0, "abc")
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
