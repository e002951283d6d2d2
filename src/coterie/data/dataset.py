"""A dataset: its samples and labels, and what is known about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.task import Classification, Task
from coterie.data.partition import Labels

Arrays = tuple[NDArray[Any], NDArray[Any]]  # samples, labels
Files = Mapping[str, Path]  # name of a file or folder -> where it was found


@dataclass(frozen=True)
class Dataset:
    """The train and test split of a dataset, as raw samples."""

    name: str
    x_train: Tensor  # (N, C, H, W) uint8, (N, F) float32, (N, T) int64, ...
    y_train: Tensor  # (N,) int64, or labels (N, ...) of another task
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]  # class names; of other tasks, names of targets, labels or tokens
    transform: Transform = field(default_factory=Transform)
    owners: tuple[Tensor, Tensor] | None = None  # (N,) int64: client of each train and test sample
    groups: tuple[Tensor, Tensor] | None = None  # (N,) int64: group of each train and test sample; never split
    client_names: tuple[str, ...] = ()  # names of the owners
    record: dict[str, Any] = field(default_factory=dict)  # added to the settings of every partition
    task: Task | type[Task] = Classification  # a class is fitted to the training labels

    def __post_init__(self) -> None:
        for split, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if len(x) != len(y):
                raise CoterieError(f"{self.name}: {len(x)} {split} samples but {len(y)} {split} labels")
            if isinstance(self.task, Task):
                self.task.check_labels(y, f"{self.name}, {split} labels")
            elif self.task.one_class and len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
                raise CoterieError(
                    f"{self.name}: {split} labels from {int(y.min())} to {int(y.max())}, "
                    f"but there are {len(self.classes)} classes"
                )

    @property
    def labels(self) -> Labels:
        """The input of a partition rule."""
        owners = self.owners and (self.owners[0].numpy(), self.owners[1].numpy())
        if not self.task.one_class:
            none = [np.zeros(len(y), np.int64) for y in (self.y_train, self.y_test)]
            return Labels(self.name, none[0], none[1], ("sample",), owners)
        return Labels(self.name, self.y_train.numpy(), self.y_test.numpy(), self.classes, owners)


def tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def dataset_of(name: str, train: Arrays, test: Arrays, classes: tuple[str, ...], **more: Any) -> Dataset:
    """A dataset of one class per sample."""
    y_train, y_test = (tensor(y.astype(np.int64)) for y in (train[1], test[1]))
    return Dataset(name, tensor(train[0]), y_train, tensor(test[0]), y_test, classes, **more)


def natural_dataset(
    name: str,
    samples: Arrays,
    owner: NDArray[np.int64],
    test: NDArray[np.bool_],
    classes: tuple[str, ...],
    **more: Any,
) -> Dataset:
    """A dataset of samples that belong to clients: (N,) their owners, and whether they are for testing."""
    (x, y), owners = samples, (tensor(owner[~test]), tensor(owner[test]))
    train, held = (tensor(x[~test]), tensor(y[~test])), (tensor(x[test]), tensor(y[test]))
    return Dataset(name, *train, *held, classes, owners=owners, **more)
