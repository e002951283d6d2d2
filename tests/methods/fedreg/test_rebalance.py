"""Rebalanced sets against FedReG's Algorithm 3, done with lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.core import random
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.methods.fedreg.rebalance import (
    COPY,
    FILLER,
    SAMPLE,
    effective,
    histograms,
    rebalance,
    rebalanced_data,
    threshold,
)

CLASSES = 5


def client(counts: list[int], seed: int = 0, real: Tensor | None = None, padding: int = 0) -> Data:
    """Every sample is a picture of its own."""
    y = torch.tensor([k for k, n in enumerate(counts) for _ in range(n)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]
    x = torch.randint(0, 256, (len(y), 3, 10, 10), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    if padding:
        real = torch.arange(len(y) + padding) < len(y)
        x, y = torch.cat([x, x[:1].expand(padding, 3, 10, 10)]), torch.cat([y, y[:1].expand(padding)])
    key = random.derive(random.seed_key(seed), 3)
    return Data(x, y, key, torch.tensor(1.0, dtype=torch.float64), CLASSES, Transform(), real)


@pytest.mark.parametrize("t", [1, 3, 7, 20, 33, 100])
@pytest.mark.parametrize("counts", [[3, 0, 9, 1, 4], [0, 0, 17, 0, 0], [5, 5, 5, 5, 5], [0, 1, 0, 0, 0]])
def test_the_set_is_that_of_algorithm_3(counts: list[int], t: int) -> None:
    data = client(counts)
    found = rebalance(data, t)
    present = [k for k in range(CLASSES) if counts[k]]
    t_c = max(t // len(present), 1)
    kept = [(int(s), int(kind)) for s, kind in zip(found.source, found.kind, strict=True) if kind != FILLER]
    assert len(kept) == t_c * len(present)
    total = 0
    for k in present:
        members = {i for i in range(len(data.y)) if data.y[i] == k}
        own = [s for s, kind in kept if kind == SAMPLE and s in members]
        copies = [s for s, kind in kept if kind == COPY and s in members]
        assert len(own) == len(set(own)) == min(counts[k], t_c)  # e_k, without replacement
        assert len(own) + len(copies) == t_c
        total += len(own)
    assert int(effective(found)) == total  # D_e
    if t_c >= max(counts):
        assert total == len(data.y)  # nothing is left out: D_e = D_o
    if len(present) == 1:
        assert t_c == max(t, 1)


def test_the_end_of_the_set_is_marked() -> None:
    """Room for any client: t, or one of each class. What is behind the end repeats the set."""
    found = rebalance(client([3, 0, 9, 1, 4]), 11)  # four classes, two of each
    assert found.kind.tolist()[:8].count(FILLER) == 0
    assert found.kind.tolist()[8:] == [FILLER] * 3
    assert set(found.source.tolist()[8:]) <= set(range(17))
    assert len(rebalance(client([3, 0, 9, 1, 4]), 2).source) == CLASSES


def test_copies_are_drawn_with_replacement_and_evenly() -> None:
    found = rebalance(client([4, 0, 0, 0, 0]), 4004)
    drawn = Counter(found.source[found.kind == COPY].tolist())
    assert sum(drawn.values()) == 4000
    assert all(900 < drawn[i] < 1100 for i in range(4))


def test_a_cut_is_random() -> None:
    """Over many clients every sample is as likely as another to stay."""
    stays = Counter(i for seed in range(400) for i in rebalance(client([10, 0, 0, 0, 0], seed), 3).source[:3].tolist())
    assert sum(stays.values()) == 1200
    assert all(80 < stays[i] < 160 for i in range(10))


def test_padding_changes_nothing() -> None:
    for counts in ([3, 0, 9, 1, 4], [0, 1, 0, 0, 0]):
        alone, padded = rebalance(client(counts), 20), rebalance(client(counts, padding=7), 20)
        assert torch.equal(alone.source, padded.source)
        assert torch.equal(alone.kind, padded.kind)


def test_clients_side_by_side_get_the_same() -> None:
    one, two = client([3, 0, 9, 1, 4]), client([0, 0, 16, 1, 0], seed=4)

    def of(y: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(rebalance(Data(one.x, y, key, one.rate, CLASSES, Transform()), 20))  # type: ignore[return-value]

    together = torch.func.vmap(of)(torch.stack([one.y, two.y]), torch.stack([one.key, two.key]))
    for i, data in enumerate((one, two)):
        for a, b in zip(together, rebalance(data, 20), strict=True):
            assert torch.equal(a[i], b)


@pytest.mark.parametrize("augmentation", ["simple", "auto", "none"])
def test_samples_stay_as_they_are_and_copies_are_varied(augmentation: str) -> None:
    data = client([3, 0, 9, 1, 4])
    chosen = rebalance(data, 42)
    made = rebalanced_data(data, chosen, augmentation, flip=True)
    assert torch.equal(made.y, data.y[chosen.source])
    assert made.real is not None
    assert torch.equal(made.real, chosen.kind != FILLER)
    same = (made.x == data.x[chosen.source]).flatten(1).all(1)
    assert same[chosen.kind == SAMPLE].all()
    copies = same[chosen.kind == COPY]
    assert copies.all() if augmentation == "none" else copies.double().mean() < 0.6
    again = rebalanced_data(client([3, 0, 9, 1, 4]), chosen, augmentation, flip=True)
    assert torch.equal(made.x, again.x)  # the same in every round
    assert made.x.dtype == torch.uint8


def test_what_is_not_an_image_is_only_repeated() -> None:
    data = client([2, 3, 0, 0, 0])
    table = Data(torch.rand(5, 7), data.y, data.key, data.rate, CLASSES, Transform())
    chosen = rebalance(table, 12)
    made = rebalanced_data(table, chosen, "simple", flip=True)
    assert torch.equal(made.x, table.x[chosen.source])
    floats = Data(torch.rand(5, 3, 10, 10), data.y, data.key, data.rate, CLASSES, Transform())
    with pytest.raises(CoterieError, match="uint8"):
        rebalanced_data(floats, chosen, "auto", flip=True)


@pytest.mark.parametrize("sizes", [[13, 20, 1, 31, 8], [4, 9, 5, 5], [7]])
def test_thresholds(sizes: list[int]) -> None:
    samples = torch.tensor(sizes)
    assert int(threshold(samples, "average")) == sum(sizes) // len(sizes)
    assert int(threshold(samples, "median")) == int(np.median(sizes))
    assert int(threshold(samples, "max")) == max(sizes)
    assert int(threshold(samples, "second-smallest")) == sorted(sizes)[min(1, len(sizes) - 1)]
    with pytest.raises(CoterieError, match="threshold"):
        threshold(samples, "mean")


def test_histograms_count_the_sets() -> None:
    counts = torch.tensor([[3, 0, 9, 1, 4], [0, 0, 2, 0, 0], [8, 8, 8, 8, 8], [1, 1, 0, 0, 0]])
    found = histograms(counts, "average")  # t = 61 // 4 = 15
    assert torch.equal(found.before, counts)
    for i, row in enumerate(counts.tolist()):
        chosen = rebalance(client(row), 15)
        y = client(row).y[chosen.source[chosen.kind != FILLER]]
        assert found.after[i].tolist() == torch.bincount(y, minlength=CLASSES).tolist()
