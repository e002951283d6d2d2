from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.data import Dataset, Partition, divide, federate, load
from coterie.data.gather import rotate


def ids(x: torch.Tensor) -> list[int]:
    return x[:, 0, 0, 0].tolist()


def test_clients_get_their_samples(tiny: Dataset) -> None:
    made = Partition("mine", (np.array([7, 0]), np.array([0, 39, 2])), (np.array([5]), np.array([], np.int64)))
    data = federate(tiny, made)
    assert (data.train.sizes, data.test.sizes, data.classes) == ((2, 3), (1, 0), 5)
    assert ids(data.train.client(0)[0]) == [7, 0]
    assert ids(data.train.client(1)[0]) == [0, 39, 2]
    assert ids(data.test.x) == [45]  # test samples are numbered on from 40
    assert data.train.y.tolist() == [2, 0, 0, 4, 2]
    assert (data.validation, data.partition.hash, data.name) == (None, made.hash, "tiny")


def test_merged_indices_run_on_into_the_test_split(tiny: Dataset) -> None:
    data = federate(tiny, Partition("mine", (np.array([59, 1]),), (np.array([40, 39]),), merged=True))
    assert (ids(data.train.x), ids(data.test.x)) == ([59, 1], [40, 39])


def test_labels_are_renamed_per_client(tiny: Dataset) -> None:
    maps = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    made = Partition("mine", (np.array([0, 1]),) * 2, (np.array([2, 3]),) * 2, label_maps=maps)
    data = federate(tiny, made)
    assert data.train.y.tolist() == [0, 1, 4, 3]
    assert data.test.y.tolist() == [2, 3, 2, 1]
    with pytest.raises(CoterieError, match="permutation of the 5 classes"):
        federate(tiny, replace(made, label_maps=maps[:, :4]))


@pytest.mark.parametrize("shape", [(28, 28), (6, 6)])
def test_quarter_turns_are_exact(shape: tuple[int, int]) -> None:
    x = torch.randint(0, 256, (3, 2, *shape), dtype=torch.uint8, generator=torch.manual_seed(0))
    for quarters in range(4):
        torch.testing.assert_close(rotate(x, 90.0 * quarters), torch.rot90(x, quarters, (2, 3)))


def test_half_turn_of_an_oblong_image_is_exact() -> None:
    x = torch.randint(0, 256, (2, 1, 4, 7), dtype=torch.uint8, generator=torch.manual_seed(0))
    torch.testing.assert_close(rotate(x, 180.0), x.flip(2, 3))


def test_an_oblong_image_keeps_its_proportions() -> None:
    x = torch.zeros(1, 1, 11, 21, dtype=torch.uint8)
    x[0, 0, 5, 7:14] = 255  # a line of 7 pixels
    turned = rotate(x, 90.0)
    assert (turned[0, 0, 2:9, 10] == 255).all()
    assert turned.sum() == x.sum()


def test_corners_of_a_turned_image_are_black() -> None:
    turned = rotate(torch.full((1, 1, 28, 28), 200, dtype=torch.uint8), 45.0)
    assert turned[0, 0, 0, 0] == turned[0, 0, -1, 0] == 0
    assert turned[0, 0, 14, 14] == 200


def test_rotation_by_client(tiny: Dataset) -> None:
    parts = (np.array([3]), np.array([3]))
    data = federate(tiny, Partition("mine", parts, parts, angles=(0.0, 90.0)))
    torch.testing.assert_close(data.train.x[0], tiny.x_train[3])
    torch.testing.assert_close(data.train.x[1], torch.rot90(tiny.x_train[3], 1, (1, 2)))
    assert int(tiny.x_train[3, 0, 0, 0]) == 3  # the dataset itself stays
    heart = load("heart-disease")
    with pytest.raises(CoterieError, match="no images to rotate"):
        federate(heart, Partition("mine", parts, parts, angles=(0.0, 90.0)))


def test_validation_is_part_of_training(tiny: Dataset) -> None:
    made = Partition("mine", (np.arange(20), np.array([30]), np.array([31, 31, 32])), (np.array([0]),) * 3)
    data, again = federate(tiny, made, 0.25, seed=3), federate(tiny, made, 0.25, seed=3)
    assert data.validation is not None
    assert again.validation is not None
    assert data.validation.sizes[:2] == (5, 0)  # one sample is never taken away
    assert sorted(ids(data.train.client(0)[0]) + ids(data.validation.client(0)[0])) == list(range(20))
    assert not set(ids(data.train.client(2)[0])) & set(ids(data.validation.client(2)[0]))
    assert data.train.sizes[2] + data.validation.sizes[2] == 3
    torch.testing.assert_close(data.validation.x, again.validation.x)
    assert ids(federate(tiny, made, 0.25, seed=4).train.x) != ids(data.train.x)
    with pytest.raises(CoterieError, match="validation must be at least 0 and less than 1, got 1"):
        federate(tiny, made, 1.0)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([[0], []], [[0], [0]], "client 1 has no training samples"),
        ([[0], [40]], [[0], [0]], "client 1 has train samples 40 to 40, but tiny has 40"),
        ([[0], [1]], [[-1], [0]], "client 0 has test samples -1 to -1, but tiny has 20"),
    ],
)
def test_impossible_partitions(tiny: Dataset, train: list[list[int]], test: list[list[int]], message: str) -> None:
    parts = [tuple(np.array(part, np.int64) for part in split) for split in (train, test)]
    with pytest.raises(CoterieError, match=message):
        federate(tiny, Partition("wrong", parts[0], parts[1]))


def test_shipped_data_make_federations() -> None:
    small = load("fashion-mnist-small")
    made = divide(small, "dominant")
    numbers = made.statistics(small.labels)
    assert numbers.train_slots == numbers.train_distinct == 6000
    data = federate(small, made)
    assert (data.num_clients, data.shape) == (20, (1, 28, 28))
    np.testing.assert_array_equal(data.train.class_counts(10).numpy(), numbers.train_counts)
    heart = load("heart-disease")
    assert federate(heart, divide(heart, "natural"), validation=0.2).shape == (13,)
