"""DP-SGD against a loop over samples, its draws and its noise against their distributions, its ledger by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.batch import Batch, Data
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.losses import cross_entropy
from coterie.core.model import Weights, make_model
from coterie.privacy import Protection
from coterie.privacy.accountant import Spent, epsilon
from coterie.privacy.noise import ReproducibleNoise
from coterie.privacy.private_sgd import PrivateSgd, SampleNoise, uses
from tests import toy

MODEL = toy.model()


def data(size: int, classes: int = toy.CLASSES) -> Data:
    x, y = toy.toy(train=(size,), test=(1,)).train.client(0)
    return Data(x, y, random.seed_key(3), torch.ones((), dtype=torch.float64), classes, Transform(), alone=True)


def sgd(**settings: Any) -> PrivateSgd:
    return PrivateSgd(
        **{"local_epochs": 1, "batch_size": 8, "lr": 0.5, "noise": 1e-12, "bound": 0.5, "key": random.seed_key(5)}
        | settings,
        source=ReproducibleNoise(),
    )


def loss(w: Weights, batch: Batch) -> Tensor:
    return cross_entropy(MODEL(w, batch.x), batch.y)


def plain_sum(weights: Weights, x: Tensor, y: Tensor, bound: float) -> Tensor:
    """Σ_j g_j min(1, C / ||g_j||), one sample after the other, by torch's own modules."""
    net = nn.Sequential(*(m.double() for m in toy.network()))
    nn.utils.vector_to_parameters(torch.cat([t.flatten() for t in tree.leaves(weights)]), net.parameters())
    total = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    for image, label in zip(x, y, strict=True):
        pixels = (image[None].double() / 255 - 0.5) / 0.5
        value = nn.functional.cross_entropy(net(pixels), label[None])
        g = torch.cat([t.flatten() for t in torch.autograd.grad(value, list(net.parameters()))])
        total += g * min(1.0, bound / float(g.norm()))
    return total


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_a_step_follows_the_sum_of_clipped_gradients(bound: float) -> None:
    own, start, train = data(20), toy.model().start, sgd(bound=bound)
    for (batch,) in train.runs(own):
        drawn = batch.sample[batch.real]
        moved, _ = train.step(start, loss, batch, own.rate, {})
        way = torch.cat([(a - b).flatten() for a, b in zip(tree.leaves(start), tree.leaves(moved), strict=True)])
        expected = (
            0.5 * plain_sum(start, own.x[drawn], own.y[drawn], bound) / 8
        )  # over the expected size, not the drawn
        torch.testing.assert_close(way, expected, atol=1e-9, rtol=1e-9)


def test_samples_are_drawn_independently_with_the_same_chance() -> None:
    own = data(20)
    sizes, counts = [], torch.zeros(20)
    for (batch,) in sgd(local_epochs=400).runs(own):
        drawn = batch.sample[batch.real]
        assert len(set(drawn.tolist())) == len(drawn)
        counts[drawn] += 1
        sizes.append(float(len(drawn)))
    assert len(sizes) == 1200  # three steps an epoch, as everywhere
    spread = torch.tensor(sizes)
    assert float(spread.mean()) == pytest.approx(8, abs=4 * math.sqrt(4.8 / 1200))  # of a binomial distribution
    assert float(spread.var()) == pytest.approx(20 * 0.4 * 0.6, rel=0.2)
    assert float((counts / 1200 - 0.4).abs().max()) < 4.5 * math.sqrt(0.24 / 1200)


def test_a_small_client_uses_all_its_samples_in_every_step() -> None:
    assert [int(b.real.sum()) for (b,) in sgd(local_epochs=3).runs(data(5)) if b.real is not None] == [5, 5, 5]


def test_a_step_without_samples_has_noise_too() -> None:
    own, start, train = data(20), toy.model().start, sgd(noise=1.0)
    (batch,) = next(train.runs(own))
    assert batch.real is not None
    moved, _ = train.step(start, loss, batch._replace(real=torch.zeros_like(batch.real)), own.rate, {})
    way = torch.cat([(a - b).flatten() for a, b in zip(tree.leaves(start), tree.leaves(moved), strict=True)])
    assert float(way.std()) == pytest.approx(0.5 * 1.0 * 0.5 / 8, rel=0.1)  # lr z C / (q n)


def test_no_noise_comes_twice() -> None:
    """Two trainings of a round, two steps with one batch, two epochs, two rounds: all have their own."""
    own, start, drawn = data(9), toy.model().start, []
    for key in (5, 6):
        first = sgd(noise=1.0, key=random.seed_key(key))
        for train in (first, first.but(local_epochs=2)):
            for (batch,) in train.runs(own):
                assert batch.real is not None
                empty = batch._replace(real=torch.zeros_like(batch.real))
                for _ in range(2):
                    moved, _ = train.step(start, loss, empty, own.rate, {})
                    drawn.append(
                        torch.cat([t.flatten() for t in tree.leaves(moved)])
                        - torch.cat([t.flatten() for t in tree.leaves(start)])
                    )
    assert len(drawn) == 2 * (2 + 4) * 2
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))
    assert float(correlation.abs().max()) < 0.2  # 888 numbers each


def test_normal_numbers_are_normal() -> None:
    drawn = random.normal(random.seed_key(1), torch.zeros(100_001, dtype=torch.float64)).sort().values
    expected = torch.special.ndtri((torch.arange(100_001) + 0.5) / 100_001)
    assert float((torch.special.ndtr(drawn) - torch.special.ndtr(expected)).abs().max()) < 1.63 / 100_001**0.5  # 1 %
    assert random.normal(random.seed_key(1), torch.zeros(3, 1)).shape == (3, 1)


def test_one_sample_moves_a_round_by_no_more_than_its_gradient() -> None:
    """Sensitivity, measured: a sample whose gradient is huge, or whose place is empty."""
    own, start = data(6), toy.model().start

    def wild(w: Weights, batch: Batch) -> Tensor:
        return loss(w, batch) * torch.where(batch.sample == 2, 1e9, 1.0)

    ends = []
    for skipped in (False, True):
        train = sgd(noise=1.0)
        (batch,) = next(train.runs(own))
        assert batch.real is not None
        batch = batch._replace(real=batch.real & (batch.sample != 2)) if skipped else batch
        ends.append(train.step(start, wild, batch, own.rate, {})[0])
    squares = [(a - b).square().sum() for a, b in zip(*map(tree.leaves, ends), strict=True)]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(0.5 * 0.5 / 6)  # lr C / (q n)


def test_a_gradient_that_is_not_finite_counts_as_none() -> None:
    own, start, train = data(6), toy.model().start, sgd()
    (batch,) = next(train.runs(own))

    def broken(w: Weights, batch: Batch) -> Tensor:
        return loss(w, batch) * torch.where(batch.sample == 2, torch.nan, 1.0)

    moved, _ = train.step(start, broken, batch, own.rate, {})
    assert all(t.isfinite().all() for t in tree.leaves(moved))


def test_networks_that_mix_samples_are_refused() -> None:
    wanted = Protection(dp="sample")
    with pytest.raises(CoterieError, match="BatchNorm"):
        wanted.around(toy.method("fedavg"), toy.model(batch_norm=True), 3, 0)
    net = nn.Sequential(nn.Flatten(), nn.RReLU(), nn.Linear(144, 4))
    with pytest.raises(CoterieError, match=r"other than dropout: 1 \(RReLU\)"):
        wanted.around(toy.method("fedavg"), make_model(net, toy.SHAPE, 4), 3, 0)


@pytest.mark.parametrize(
    ("name", "settings", "trained", "finished"),
    [
        ("fedavg", {}, [1, 1], [1, 1]),
        ("fedrep", {"head_epochs": 3}, [1] * 5, []),
        ("ditto", {"personal_epochs": 1}, [1] * 3, []),
        ("apfl", {}, [2, 2], []),
        ("pfedme", {"steps": 5}, [5, 5], []),
        ("fedbabu", {"finetune_epochs": 4}, [1, 1], [1] * 4),
        ("knn-per", {}, [1, 1], []),
        ("fedcrc", {"shared_epochs": 1}, [1] * 5, []),
        ("fedreg", {"rebalance": False}, [1] * 4, []),
        ("local", {}, [1, 1], []),
    ],
)  # fmt: skip
def test_the_ledger_counts_what_a_method_trains(
    name: str, settings: dict[str, Any], trained: list[int], finished: list[int]
) -> None:
    method, x = toy.method(name, **settings), toy.toy().train.x[:1]
    assert uses(method, toy.model(), x, train=True) == trained
    assert uses(method, toy.model(), x, train=False) == finished


def test_the_guarantee_is_that_of_its_steps() -> None:
    """FedAvg, 2 epochs of 3 steps with q = 8/20, four rounds and a last training, then two epochs of fine-tuning."""
    found = Protection(dp="sample", dp_noise=2.0).guarantee(
        toy.method("fedavg"), toy.model(), toy.toy().train.x[:1], (20,), (4,), again=True
    )
    assert found["epsilon"] == pytest.approx(epsilon([Spent(5 * 6 + 6, 2.0, 0.4)], 1e-5), rel=1e-4)
    assert found["delta"] == 1e-5


def test_the_guarantee_is_that_of_the_worst_client() -> None:
    def found(sizes: tuple[int, ...], rounds: tuple[int, ...]) -> float:
        told = Protection(dp="sample", dp_noise=2.0).guarantee(
            toy.method("fedper"), toy.model(), toy.toy().train.x[:1], sizes, rounds, again=False
        )
        return float(told["epsilon"])

    assert found((20, 400), (4, 4)) == found((20,), (4,)) > found((400,), (4,))
    assert found((20, 20), (2, 9)) == found((20,), (9,)) > found((20,), (2,))


def test_the_momentum_and_weight_decay_of_a_method_stay() -> None:
    train = sgd(noise=1.0, momentum=0.9, weight_decay=0.1, keep_momentum=True).but(lr=0.25)
    assert isinstance(train, PrivateSgd)
    assert (train.momentum, train.weight_decay, train.lr) == (0.9, 0.1, 0.25)
    assert replace(train).cursor is train.cursor


def test_dropout_stacked_equals_looped() -> None:
    method = SampleNoise(inner=toy.method("ditto"), noise=1.0, bound=0.1, source=ReproducibleNoise())
    model, data = toy.model(dropout=0.3), toy.toy()
    expected, _ = toy.looped(method, model, data, rounds=2)
    assert toy.distance(expected, toy.stacked(method, model, data, rounds=2)[0]) < 1e-10
    kept, _ = toy.looped(method, toy.model(dropout=1e-9), data, rounds=2)
    assert toy.distance(expected, kept) > 1e-3
