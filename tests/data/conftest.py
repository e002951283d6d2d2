from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from coterie.data import Dataset, Labels


@pytest.fixture
def balanced() -> Callable[..., Labels]:
    """Labels of a dataset with equally many samples of each class, in random order."""

    def make(name: str, classes: int, train: int, test: int) -> Labels:
        draw = np.random.default_rng(7)
        y_train, y_test = (draw.permutation(np.repeat(np.arange(classes), n)) for n in (train, test))
        return Labels(name, y_train, y_test, tuple(map(str, range(classes))))

    return make


@pytest.fixture
def tiny() -> Dataset:
    """40 train and 20 test images of 5 classes; the first pixel of an image is its index."""
    x = torch.zeros(60, 1, 4, 4, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.arange(60)
    y = torch.arange(60) % 5
    return Dataset("tiny", x[:40], y[:40], x[40:], y[40:], tuple("abcde"))
