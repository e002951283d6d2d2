from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from coterie.core.errors import CoterieError
from coterie.data import PARTITIONS, Dataset, Labels, divide, load
from coterie.data.dirichlet import draw_counts

Balanced = Callable[..., Labels]


def drawn_labels(train: list[int], test: list[int]) -> Labels:
    y_train, y_test = (np.repeat(np.arange(len(sizes)), sizes) for sizes in (train, test))
    return Labels("drawn", y_train, y_test, tuple(map(str, range(len(train)))))


sizes = st.lists(st.tuples(st.integers(5, 60), st.integers(2, 20)), min_size=2, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes,
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.3, 1.0, 10.0]),
    seed=st.integers(0, 10**6),
    rule=st.sampled_from(["dirichlet", "dirichlet-crc", "dirichlet-pfllib"]),
)
def test_merged_dirichlet_uses_every_sample_once(
    sizes: list[tuple[int, int]], clients: int, alpha: float, seed: int, rule: str
) -> None:
    labels = drawn_labels([a for a, _ in sizes], [b for _, b in sizes])
    try:
        made = PARTITIONS[rule](labels, num_clients=clients, alpha=alpha, min_size=2, seed=seed, retries=500)
    except CoterieError as error:
        assert "500 draws" in str(error)  # noqa: PT017
        return
    assert made.merged
    every = np.concatenate(made.train + made.test)
    np.testing.assert_array_equal(np.sort(every), np.arange(len(labels.merged)))
    share = 0.8 if rule == "dirichlet-crc" else 0.75
    for train, test in zip(made.train, made.test, strict=True):
        assert len(train) + len(test) >= 2
        assert len(train) == max(1, int(share * (len(train) + len(test))))


@settings(max_examples=40, deadline=None)
@given(sizes=sizes, clients=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_dirichlet_pac_gives_the_same_shares_of_train_and_test(
    sizes: list[tuple[int, int]], clients: int, seed: int
) -> None:
    labels = drawn_labels([a for a, _ in sizes], [b for _, b in sizes])
    made = PARTITIONS["dirichlet-pac"](labels, num_clients=clients, seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(made.train)), np.arange(len(labels.train)))
    np.testing.assert_array_equal(np.sort(np.concatenate(made.test)), np.arange(len(labels.test)))
    numbers = made.statistics(labels)
    train_share = numbers.train_counts / np.bincount(labels.train)
    test_share = numbers.test_counts / np.bincount(labels.test)
    assert (abs(train_share - test_share) <= 1 / np.bincount(labels.test) + 1 / np.bincount(labels.train) + 1e-9).all()


def test_dirichlet_cap_keeps_sizes_comparable(balanced: Balanced) -> None:
    labels = balanced("cifar10", 10, 500, 100)
    capped = PARTITIONS["dirichlet"](labels, num_clients=20, min_size=1)
    free = PARTITIONS["dirichlet-crc"](labels, num_clients=20, alpha=0.1, min_size=1)
    largest = [max(map(len, made.train)) for made in (capped, free)]
    # a client is full at N/m = 300; what it gets last may take it over by at most one class
    assert largest[0] <= 0.75 * (300 + 600)
    assert largest[0] < largest[1]


@pytest.mark.parametrize(("clients", "smallest", "chance"), [(20, 80, 0.78), (30, 80, 0.48), (50, 80, 0.10)])
def test_dirichlet_is_drawn_from_the_known_distribution(clients: int, smallest: int, chance: float) -> None:
    """How often CIFAR-10 at alpha 0.1 leaves nobody below 80 samples: known from another implementation."""
    draw = np.random.default_rng(1)
    drawn = [draw_counts(draw, [6000] * 10, clients, 0.1, True) for _ in range(400)]
    large = [counts is not None and counts.sum(axis=0).min() >= smallest for counts in drawn]
    assert abs(np.mean(large) - chance) < 0.08


def test_dirichlet_pfllib_draws_what_pfllib_draws() -> None:
    """PFLlib's procedure on numpy's global generator, written again, with scikit-learn's own split."""
    y = np.repeat(np.arange(4), [300, 40, 160, 100])[np.random.default_rng(5).permutation(600)]
    np.random.seed(3)  # noqa: NPY002
    held: list[list[int]] = [[]]
    while min(map(len, held)) < 80:
        held = [[] for _ in range(5)]
        for label in range(4):
            samples = np.where(y == label)[0]
            np.random.shuffle(samples)  # noqa: NPY002
            share = np.random.dirichlet([0.3] * 5)  # noqa: NPY002
            share = np.array([p if len(own) < 600 / 5 else 0 for p, own in zip(share, held, strict=True)])
            ends = (np.cumsum(share / share.sum()) * len(samples)).astype(int)
            for i, own in enumerate(held):
                own += samples[ends[i - 1] if i else 0 : ends[i] if i < 4 else None].tolist()
    made = PARTITIONS["dirichlet-pfllib"](
        Labels("y", y[:450], y[450:], tuple("abcd")), num_clients=5, alpha=0.3, min_size=80, seed=3
    )
    for own, train, test in zip(held, made.train, made.test, strict=True):
        theirs = train_test_split(own, train_size=0.75, shuffle=True)
        assert [train.tolist(), test.tolist()] == theirs


def test_dirichlet_pfllib_gives_the_clients_of_pfakd() -> None:
    """Its authors' generator for CIFAR-10 (seed 42) makes clients of 3,707 to 8,084 images."""
    y = np.tile(np.arange(10), 6000)
    made = PARTITIONS["dirichlet-pfllib"](
        Labels("y", y[:50000], y[50000:], tuple("0123456789")), num_clients=10, alpha=0.5, seed=42
    )
    sizes = [len(train) + len(test) for train, test in zip(made.train, made.test, strict=True)]
    assert (min(sizes), max(sizes)) == (3707, 8084)


def test_dirichlet_gives_up_in_words(balanced: Balanced) -> None:
    labels = balanced("cifar10", 10, 500, 100)
    with pytest.raises(CoterieError, match=r"none of 20 draws of 6000 samples .* 50 clients min_size=40"):
        PARTITIONS["dirichlet"](labels, num_clients=50, alpha=0.01, min_size=40, retries=20)


def test_iid(balanced: Balanced) -> None:
    labels = balanced("mnist", 10, 100, 30)
    numbers = PARTITIONS["iid"](labels, num_clients=7).statistics(labels)
    assert set(numbers.train_sizes) == {142}
    assert set(numbers.test_sizes) == {42}
    assert numbers.train_distinct == numbers.train_slots == 994
    with pytest.raises(CoterieError, match=r"local_size must be .*, got 200"):
        PARTITIONS["iid"](labels, num_clients=7, local_size=200)


@pytest.mark.parametrize("clustered", [False, True])
def test_pathological(balanced: Balanced, clustered: bool) -> None:
    labels = balanced("cifar10", 10, 5000, 1000)
    made = PARTITIONS["pathological"](labels, clustered=clustered)
    numbers = made.statistics(labels)
    present = numbers.train_counts > 0
    np.testing.assert_array_equal(present.sum(axis=1), np.tile([3, 3, 5, 5, 8], 4))
    np.testing.assert_array_equal(present, numbers.test_counts > 0)
    assert present.any(axis=0).all()
    assert set(numbers.train_sizes) == {600}
    assert set(numbers.test_sizes) == {300}
    assert numbers.train_counts[0].max() == 200
    different = len(np.unique(present, axis=0))
    assert different == 5 if clustered else different > 10


def test_pathological_with_one_number_for_all(balanced: Balanced) -> None:
    labels = balanced("mnist", 10, 500, 200)
    made = PARTITIONS["pathological"](labels, num_clients=9, classes_per_client=(2,), local_size=50, test_size=20)
    assert set((made.statistics(labels).train_counts > 0).sum(axis=1)) == {2}
    assert set(made.groups) == {0}


def test_natural(tiny: Dataset) -> None:
    heart = load("heart-disease")
    made = divide(heart, "natural")
    assert [len(part) for part in made.train] == [228, 221, 93, 151]
    assert sum(map(len, made.test)) == len(heart.y_test)
    with pytest.raises(CoterieError, match="does not say which client"):
        divide(tiny, "natural")


@pytest.mark.parametrize("rule", PARTITIONS)
def test_every_rule_is_deterministic_and_records_its_settings(rule: str, balanced: Balanced) -> None:
    labels = balanced("mnist", 10, 2000, 500)
    labels = labels._replace(owners=(labels.train % 3, labels.test % 3))
    first, second = PARTITIONS[rule](labels), PARTITIONS[rule](labels)
    assert first.hash == second.hash
    assert first.name == rule
    parameters = [name for name in inspect.signature(PARTITIONS[rule]).parameters if name != "labels"]
    assert set(parameters) <= set(first.settings)
    ordered = ("seed",) if rule in ("dominant", "scarce", "rotation") else ()  # None: in the order of the dataset
    assert None not in [first.settings[name] for name in parameters if rule != "iid" and name not in ordered]
    assert PARTITIONS[rule].__doc__


@pytest.mark.parametrize(
    "rule", [name for name, make in PARTITIONS.items() if "seed" in inspect.signature(make).parameters]
)
def test_the_seed_matters(rule: str, balanced: Balanced) -> None:
    labels = balanced("mnist", 10, 2000, 500)
    assert PARTITIONS[rule](labels, seed=1).hash != PARTITIONS[rule](labels, seed=2).hash


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("dominant", {"num_clients": 0}),
        ("dominant", {"noniid_s": -1}),
        ("dominant", {"noniid_s": 101}),
        ("dominant", {"noniid_s": float("nan")}),
        ("dominant", {"local_size": 0}),
        ("dominant", {"test_size": 0}),
        ("dominant", {"train_offset": -1}),
        ("dominant", {"remainder": "lost"}),
        ("scarce", {"local_size": -5}),
        ("imbalanced", {"sizes": ()}),
        ("imbalanced", {"sizes": (0, 5)}),
        ("imbalanced", {"seed": -1}),
        ("concept-shift", {"num_clients": 0}),
        ("rotation", {"angles": ()}),
        ("dirichlet", {"alpha": 0}),
        ("dirichlet", {"alpha": float("nan")}),
        ("dirichlet", {"min_size": 0}),
        ("dirichlet", {"train_share": 1.5}),
        ("dirichlet", {"retries": 0}),
        ("dirichlet", {"min_size": 10**6}),
        ("dirichlet-pac", {"alpha": -1}),
        ("dirichlet-crc", {"num_clients": 0}),
        ("iid", {"num_clients": 0}),
        ("iid", {"num_clients": 10**6}),
        ("iid", {"test_size": 0}),
        ("pathological", {"classes_per_client": (11,)}),
        ("pathological", {"classes_per_client": ()}),
        ("pathological", {"classes_per_client": (10, 10), "clustered": True}),
        ("pathological", {"local_size": 0}),
    ],
)
def test_impossible_settings_are_named(rule: str, wrong: dict[str, Any], balanced: Balanced) -> None:
    with pytest.raises(CoterieError) as caught:
        PARTITIONS[rule](balanced("mnist", 10, 600, 300), **wrong)
    (name,) = [name for name in wrong if name != "clustered"]
    assert name in str(caught.value) or "sets of" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_divide_knows_rules_and_settings(tiny: Dataset) -> None:
    assert divide(tiny, "iid", num_clients=4).clients == 4
    with pytest.raises(CoterieError, match="did you mean 'dirichlet'"):
        divide(tiny, "dirichelt")
    with pytest.raises(CoterieError, match="unknown setting of iid 'num_client': did you mean 'num_clients'"):
        divide(tiny, "iid", num_client=4)
