"""The counts here are facts of the FedPAC paper's released partition, found independently of this code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coterie.core.errors import CoterieError
from coterie.data import PARTITIONS, Labels
from coterie.data.dominant import shares

Balanced = Callable[..., Labels]


@pytest.mark.parametrize(
    ("name", "train", "test", "clients", "slots"),
    [  # per class; then train slots, distinct, test slots, distinct
        ("cifar10", 5000, 1000, 100, (60_000, 46_328, 30_000, 9_864)),
        ("fashion-mnist", 6000, 1000, 100, (60_000, 51_528, 60_000, 9_444)),
        ("cinic10", 9000, 9000, 100, (60_000, 60_000, 30_000, 30_000)),
        ("cifar10", 5000, 1000, 20, (12_000, 12_000, 6_000, 6_000)),
        ("fashion-mnist", 6000, 1000, 20, (12_000, 12_000, 12_000, 9_228)),
    ],
)
def test_published_counts(
    balanced: Balanced, name: str, train: int, test: int, clients: int, slots: tuple[int, ...]
) -> None:
    labels = balanced(name, 10, train, test)
    numbers = PARTITIONS["dominant"](labels, num_clients=clients).statistics(labels)
    assert numbers[4:] == slots
    wanted = np.full((5, 10), 12)
    for group, own in enumerate([(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0)]):
        wanted[group, own] = 172
    np.testing.assert_array_equal(numbers.train_counts, np.tile(wanted, (clients // 5, 1)))
    test_scale = 1 if name == "fashion-mnist" else 2
    np.testing.assert_array_equal(numbers.test_counts * test_scale, numbers.train_counts)


def test_scarce(balanced: Balanced) -> None:
    labels = balanced("cifar10", 10, 5000, 1000)
    numbers = PARTITIONS["scarce"](labels).statistics(labels)
    assert numbers[4:6] == (50_000, 42_968)
    assert numbers.train_counts[0].tolist() == [14, 14, 15, 1, 1, 1, 1, 1, 1, 1]
    assert set(numbers.test_sizes) == {300}


def test_emnist(balanced: Balanced) -> None:
    labels = balanced("emnist", 62, 2000, 500)
    made = PARTITIONS["dominant"](labels)
    numbers = made.statistics(labels)
    assert np.bincount(made.groups).tolist() == [7, 7, 6]
    assert numbers.train_counts[0].tolist() == [83] * 10 + [3] * 51 + [17]
    assert numbers.train_counts[1].tolist() == [3] * 10 + [33] * 25 + [53] + [3] * 25 + [17]
    assert numbers.train_counts[2].tolist() == [3] * 36 + [33] * 25 + [67]
    assert numbers.test_counts[0].tolist() == [49] * 10 + [1] * 51 + [59]
    assert numbers.test_counts[1].tolist() == [1] * 10 + [19] * 25 + [31] + [1] * 25 + [59]
    # client 1 got 50 of class 35, but the authors' pointer moved by 30
    own = [part[labels.train[part] == 35] for part in made.train]
    assert len(np.intersect1d(own[1], own[2])) == 3
    spread = PARTITIONS["dominant"](labels, remainder="spread").statistics(labels)
    assert spread.train_counts[0].max() - spread.train_counts[0][10:].max() == 80
    assert spread.train_counts[0][10:].max() == 4
    assert spread.train_slots == 20_000


def test_selection_is_by_class_in_order(balanced: Balanced) -> None:
    labels = balanced("mnist", 10, 500, 500)
    train = PARTITIONS["dominant"](labels, num_clients=2, local_size=100).train
    zeros = np.flatnonzero(labels.train == 0)
    np.testing.assert_array_equal(train[0][labels.train[train[0]] == 0], zeros[:28])  # 2, then 26
    np.testing.assert_array_equal(train[1][labels.train[train[1]] == 0], zeros[28:30])


@pytest.mark.parametrize("s", [0, 20, 37.5, 100])
@pytest.mark.parametrize("classes", [4, 5, 10, 100])
def test_sizes_for_any_s_and_number_of_classes(balanced: Balanced, s: float, classes: int) -> None:
    labels = balanced("anything", classes, 200, 200)
    made = PARTITIONS["dominant"](labels, num_clients=7, noniid_s=s, local_size=103)
    numbers = made.statistics(labels)
    assert set(numbers.train_sizes) == {103}
    assert (numbers.train_counts.sum(axis=0) > 0).sum() >= min(classes, 15)
    if s == 0:
        assert set((numbers.train_counts > 0).sum(axis=1)) == {3}


def test_imbalanced(balanced: Balanced) -> None:
    labels = balanced("cifar10", 10, 5000, 1000)
    numbers = PARTITIONS["imbalanced"](labels, num_clients=60).statistics(labels)
    assert set(numbers.train_sizes) == {300, 600, 1200}
    assert set(numbers.test_sizes) == {300}


def test_concept_shift(balanced: Balanced) -> None:
    labels = balanced("fashion-mnist", 10, 6000, 1000)
    plain, shifted = PARTITIONS["dominant"](labels), PARTITIONS["concept-shift"](labels)
    maps = shifted.label_maps
    assert maps is not None
    assert maps[0].tolist() == list(range(10))
    assert len(np.unique(maps, axis=0)) == 5
    np.testing.assert_array_equal(maps[:5], maps[5:10])
    np.testing.assert_array_equal(np.sort(maps), np.tile(np.arange(10), (20, 1)))
    np.testing.assert_array_equal(np.concatenate(plain.train), np.concatenate(shifted.train))
    counts = shifted.statistics(labels).train_counts
    np.testing.assert_array_equal(np.sort(counts), np.sort(plain.statistics(labels).train_counts))
    assert counts[1][maps[1][2]] == 172


def test_rotation(balanced: Balanced) -> None:
    labels = balanced("fashion-mnist", 10, 6000, 1000)
    made = PARTITIONS["rotation"](labels)
    assert made.angles is not None
    assert made.angles[:6] == (0, 72, 144, 216, 288, 0)
    assert (made.statistics(labels).train_counts == 60).all()


def test_too_few_samples_of_a_class(balanced: Balanced) -> None:
    with pytest.raises(CoterieError, match=r"class 0 has 90 samples, but one client needs 160"):
        PARTITIONS["dominant"](balanced("mnist", 10, 90, 90))
    with pytest.raises(CoterieError, match="at least 4 classes"):
        PARTITIONS["dominant"](balanced("heart-disease", 2, 300, 300))


@pytest.mark.parametrize("size", [0, 1, 61, 120, 200])
def test_shares(size: int) -> None:
    assert sum(shares(size, 62, "last")) == sum(shares(size, 62, "spread")) == size
    spread = shares(size, 62, "spread")
    assert max(spread) - min(spread) <= 1
