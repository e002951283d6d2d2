"""What is taken over all samples of a client, and for each of its models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data, each, sample_losses
from coterie.core.init import networks
from coterie.core.losses import cross_entropy
from coterie.core.model import Weights
from coterie.core.training import LocalTraining
from tests import plain, toy


def held(client: int = 3, augmented: bool = True) -> Data:
    data = toy.toy(augmented=augmented)
    x, y = data.train.client(client)
    return Data(x, y, torch.tensor(5), torch.tensor(1.0, dtype=torch.float64), data.classes, data.transform)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_samples_are_taken_as_they_are(batch_norm: bool) -> None:
    """No crop, no flip, and BatchNorm as in testing."""
    data, model, net = held(), toy.model(batch_norm=batch_norm), toy.network(batch_norm).double().eval()
    net.load_state_dict(plain.named(model.start, net), strict=False)
    with torch.no_grad():
        expected = F.cross_entropy(net((data.x.double() / 255 - 0.5) / 0.5), data.y, reduction="none")
    torch.testing.assert_close(sample_losses(model, model.start, data), expected, rtol=1e-12, atol=1e-12)


def test_means_leave_padding_out() -> None:
    data = held()
    real = torch.arange(len(data.y)) < 11
    values = torch.randn(len(data.y), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(replace(data, real=real).mean(values), values[:11].mean(0))
    torch.testing.assert_close(replace(data, real=real).mean(values[:, 0]), values[:11, 0].mean())
    torch.testing.assert_close(data.mean(values), values.mean(0))


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_models_train_the_same_side_by_side_and_in_turn(batch_norm: bool) -> None:
    data, model = held(), toy.model(batch_norm=batch_norm)
    models, factors = networks(model, 3), torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)

    def one(w: Weights, factor: Tensor) -> Weights:
        return LocalTraining(local_epochs=1, batch_size=8)(
            w, lambda w, batch: factor * cross_entropy(model(w, batch.x), batch.y), where, {}
        )[0]

    found = []
    for alone in (False, True):
        where = replace(data, alone=alone)
        found.append(tree.flatten(each(one, (models, factors), where)))
    assert toy.distance(*found) < 1e-12
    assert toy.distance(found[0], tree.flatten(models)) > 1e-3
    for name, t in found[0].items():
        if not tree.is_statistic(name):
            assert torch.equal(t[2], tree.flatten(models)[name][2]), name  # nothing drew at the third
