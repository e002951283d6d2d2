"""Networks that end in a sigmoid or softmax are refused where the loss takes logits, and no others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from coterie.core.errors import CoterieError
from coterie.core.model import make_model
from coterie.core.task import Classification, Task
from coterie.core.tasks import MultiLabel, NextToken, Regression, Segmentation

BODY = (nn.Linear(4, 8), nn.ReLU())


class Ended(nn.Module):
    """A linear layer, and a function of its outputs."""

    def __init__(self, end: Callable[[Tensor], Tensor], outputs: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(8, outputs), end
        nn.init.uniform_(self.linear.weight, -scale, scale)

    def forward(self, z: Tensor) -> Tensor:
        return self.end(self.linear(z))


def softmax(z: Tensor) -> Tensor:
    return z.softmax(1)


@pytest.mark.parametrize("task", [Classification(3), MultiLabel(3), Regression(3, [1.0, 2, 3], [2.0, 2, 2])])
@pytest.mark.parametrize("end", [torch.sigmoid, nn.Sigmoid(), nn.Hardsigmoid(), softmax, nn.Softmax(1)])
def test_bounded_outputs_are_refused(task: Task, end: Callable[[Tensor], Tensor]) -> None:
    what = "softmax" if end is softmax or isinstance(end, nn.Softmax) else "sigmoid"
    for network in (nn.Sequential(*BODY, Ended(end)), Ended(lambda z: end(z), scale=1e-4)):
        with pytest.raises(CoterieError, match=f"ends in a {what}.*remove this last activation"):
            make_model(network, (4,) if isinstance(network, nn.Sequential) else (8,), task, label=(3,))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end", [nn.Identity(), nn.ReLU(), nn.Softplus(), nn.Tanh(), nn.LogSoftmax(1), torch.square])
def test_other_ends_are_taken(end: Callable[[Tensor], Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    for outputs, scale in ((1, 1e-6), (3, 1e-6), (3, 0.1), (1, 1.0)):
        make_model(nn.Sequential(*BODY, Ended(end, outputs, scale)), (4,), MultiLabel(outputs), label=(outputs,))


def test_a_layer_that_is_dead_is_taken() -> None:
    network = nn.Sequential(*BODY, Ended(nn.ReLU()))
    nn.init.constant_(network[2].linear.bias, -1.0)
    nn.init.zeros_(network[2].linear.weight)
    make_model(network, (4,), MultiLabel(3), label=(3,))


def test_targets_that_are_not_standardized_may_be_bounded() -> None:
    make_model(nn.Sequential(*BODY, Ended(torch.sigmoid)), (4,), Regression(3), label=(3,))


def test_classes_along_other_axes() -> None:
    tokens = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5), nn.Softmax(2))
    with pytest.raises(CoterieError, match=r"ends in a softmax.*next-token"):
        make_model(tokens, (6,), NextToken(5), sample_type=torch.int64, label=(6,))
    pixels = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 3, 1), nn.Softmax2d())
    with pytest.raises(CoterieError, match=r"ends in a softmax.*segmentation"):
        make_model(pixels, (1, 4, 4), Segmentation(3), label=(4, 4))
