"""Noise on class statistics: what is sent comes from noisy sums; the sums change with one sample as it is said."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Data, features
from coterie.core.data import Transform
from coterie.core.tree import live
from coterie.privacy import Protection
from coterie.privacy.accountant import Spent, epsilon, exact_epsilon
from coterie.privacy.noise import ReproducibleNoise
from coterie.privacy.statistics_noise import StatisticsNoise, clipping
from tests import toy

CLIP = 0.7


def data(size: int = 30) -> Data:
    x, y = toy.toy(train=(size,), test=(1,)).train.client(0)
    return Data(x, y, random.seed_key(3), torch.ones((), dtype=torch.float64), toy.CLASSES, Transform(), alone=True)


def sent(name: str, noise: float, own: Data) -> Any:
    """Up of one client in the first round, from a method that trains nothing."""
    model, inner = toy.model(), toy.method(name, lr=0.0, **({"head_lr": 0.0} if name != "fedproto" else {}))
    method = StatisticsNoise(inner=inner, noise=noise, bound=CLIP, source=ReproducibleNoise())
    census = toy.Looped(inner, model, toy.toy(), 0, processes=1).census
    down = method.server_send(method.server_init(model, census), torch.tensor(0))
    return method.client_train(model, method.client_init(model, own, {}), down, own)[1]


def by_hand(own: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped features, sums by class, counts."""
    model = toy.model()
    z = torch.stack([model.features(model.start.encoder, x[None])[0] for x in own.x])
    z = torch.stack([row * min(1.0, CLIP / float(row.norm())) for row in z])
    sums = torch.stack([z[own.y == k].sum(0) for k in range(toy.CLASSES)])
    return z, sums, torch.bincount(own.y, minlength=toy.CLASSES).double()


def test_with_next_to_no_noise_they_are_those_of_clipped_features() -> None:
    own = data()
    z, sums, counts = by_hand(own)
    assert z.norm(dim=1).max() == pytest.approx(CLIP)  # some are clipped
    up, n = sent("fedpac", 1e-9, own), len(own.y)
    torch.testing.assert_close(up.counts, counts, atol=1e-4, rtol=0)
    torch.testing.assert_close(up.prototypes, sums / counts.clamp_min(1)[:, None], atol=1e-6, rtol=0)
    torch.testing.assert_close(up.moments, sums / n, atol=1e-6, rtol=0)
    variance = (z.square().sum() / n - (sums / n).square().sum()) / n
    assert float(up.variance) == pytest.approx(float(variance), rel=1e-5)


@pytest.mark.parametrize(("name", "parts"), [("fedpac", 4), ("fedpac-proto", 2), ("fedproto", 2)])
def test_noise_has_the_deviation_of_its_parts(name: str, parts: int) -> None:
    """On the sums: z c √parts. Seen in moments where they are sent; elsewhere in prototypes of an absent class."""
    own, noise = data(), 0.01
    _, sums, counts = by_hand(own)
    drawn = []
    for key in range(60):
        up = sent(name, noise, replace(own, key=random.seed_key(key)))
        assert (up.counts >= 0).all()
        assert float(up.counts.sum()) == pytest.approx(len(own.y), rel=1e-5)
        drawn.append((up.moments * len(own.y) if name == "fedpac" else up.prototypes * counts[:, None]) - sums)
    spread = float(torch.stack(drawn)[:, counts > 0].std())
    assert spread == pytest.approx(noise * math.sqrt(parts) * CLIP, rel=0.25)


def test_one_sample_changes_the_sums_by_no_more_than_root_parts() -> None:
    """Sensitivity, by brute force: every sample in turn has its place empty; n stays."""
    own = data()
    z, sums, counts = by_hand(own)

    def vector(kept: Tensor) -> Tensor:
        member = torch.nn.functional.one_hot(own.y, toy.CLASSES).double() * kept[:, None]
        total = member.T @ z
        return torch.cat([member.sum(0), total.flatten() / CLIP, total.flatten() / CLIP,
                          (kept @ z.square().sum(1))[None] / CLIP**2])  # fmt: skip

    everything = vector(torch.ones(len(own.y), dtype=torch.float64))
    torch.testing.assert_close(everything[: toy.CLASSES], counts)
    torch.testing.assert_close(everything[toy.CLASSES : toy.CLASSES + sums.numel()], sums.flatten() / CLIP)
    changes = [float((everything - vector((torch.arange(len(own.y)) != j).double())).norm()) for j in range(len(own.y))]
    assert max(changes) <= 2 + 1e-12
    assert max(changes) == pytest.approx(2)  # and the bound is met


def test_weights_under_training_are_not_clipped() -> None:
    model, own = toy.model(), data()
    tight, x = clipping(model, 1e-3), own.x[:5]
    assert tight.features(model.start.encoder, x).norm(dim=1).max() <= 1e-3 + 1e-12
    torch.testing.assert_close(tight.features(live(model.start.encoder), x), model.features(model.start.encoder, x))
    assert features(tight, model.start.encoder, own).norm(dim=1).max() <= 1e-3 + 1e-12


def test_only_statistics_get_noise() -> None:
    model, data = toy.model(), toy.toy()
    inner = toy.method("fedpac", align=0.0, combine=False)
    quiet = Protection(dp_statistics=1e-6, dp_statistics_clip=100.0).around(inner, model, 3, 7)
    a, _ = toy.looped(inner, model, data, rounds=1, join_ratio=1.0)
    b, _ = toy.looped(quiet, model, data, rounds=1, join_ratio=1.0)
    assert toy.distance({k: t for k, t in a.items() if "heads" in k}, {k: t for k, t in b.items() if "heads" in k}) == 0
    assert toy.distance(a, b) < 1e-2
    assert tree.flatten(a).keys() == tree.flatten(b).keys()


def test_what_it_costs() -> None:
    x, own = toy.toy().train.x[:1], toy.method("fedpac", align=0.0)
    alone = Protection(dp_statistics=5.0).guarantee(own, toy.model(), x, (20, 30), (3, 8), again=False)
    assert alone["epsilon"] == pytest.approx(exact_epsilon(math.sqrt(8) / 5, 1e-5), rel=1e-3)
    assert "weights, which get no noise" in alone["covers"]
    both = Protection(dp="sample", dp_noise=3.0, dp_statistics=5.0)
    found = both.guarantee(own, toy.model(), x, (20,), (8,), again=False)
    steps = Spent(8 * 3 * 3, 3.0, 0.4)  # a head's epoch and two of the encoder's, of three steps
    assert found["epsilon"] == pytest.approx(epsilon([steps, Spent(8, 5.0)], 1e-5), rel=1e-3)
