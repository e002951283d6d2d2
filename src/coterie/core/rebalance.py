"""Rebalanced sets (FedReG, Algorithm 3): on every client all its classes have equally many samples.

A class with too many is cut by chance; one with too few is filled up with varied copies of its images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core import images, order
from coterie.core.errors import CoterieError, unknown
from coterie.core.local import Data

THRESHOLDS = ("average", "median", "max", "second-smallest")
FILLER, SAMPLE, COPY = range(3)


class Rebalanced(NamedTuple):
    """Which samples the set is made of. The images are made anew from this whenever they are needed."""

    source: Tensor  # (R,) which sample of the client
    kind: Tensor  # (R,) uint8, SAMPLE, COPY (varied), or FILLER: behind the set's end, a sample that does not count
    key: Tensor  # () randomness of the copies


class Histograms(NamedTuple):
    before: Tensor  # (m, K) samples of each client and class
    after: Tensor  # (m, K) those in the rebalanced sets


def threshold(samples: Tensor, rule: str) -> Tensor:
    """() t, about how many samples each rebalanced set has, from the sizes (m,) of all clients."""
    sizes = samples.double()
    match rule:
        case "average":
            t = sizes.mean()
        case "median":
            t = sizes.quantile(0.5)
        case "max":
            t = sizes.max()
        case "second-smallest":
            t = sizes.sort().values[:2][-1]
        case _:
            raise unknown("threshold", rule, THRESHOLDS)
    return t.floor().long()


def per_class(counts: Tensor, t: Tensor | int) -> Tensor:
    """(...) t_c, samples of each class that is there, from class counts (..., K)."""
    return (t // (counts > 0).sum(-1).clamp_min(1)).clamp_min(1)  # eq. (7), at least one


def histograms(counts: Tensor, rule: str = "average") -> Histograms:
    """From class counts (m, K) of all clients."""
    t = threshold(counts.sum(1), rule)
    return Histograms(counts, (counts > 0) * per_class(counts, t)[:, None])


def rebalance(data: Data, t: int) -> Rebalanced:
    """Algorithm 3 for one client."""
    key = order.fold(data.key, order.REBALANCE)
    counts = data.counts.long()  # (K,)
    wanted = per_class(counts, t)  # () t_c
    size = wanted * (counts > 0).sum()  # ()
    slot = torch.arange(max(t, data.classes), device=data.y.device)  # (R,), room for any client
    place = slot % size  # the filler repeats the set
    label = (counts == 0).long().argsort(stable=True)[place // wanted]  # (R,) classes that are there, in turn
    number = place % wanted  # (R,) which of its class

    shuffled = order.shuffle(order.fold(key, 0), len(data.y), data.real)
    classes = data.y if data.real is None else torch.where(data.real, data.y, data.classes)
    grouped = shuffled[classes[shuffled].argsort(stable=True)]  # (n,) by class, at random within one
    first = (counts.cumsum(0) - counts)[label]  # (R,) where its class begins
    again = order.bits(order.fold(key, 1), slot) % counts[label].clamp_min(1)
    original = number < counts[label]
    source = grouped[first + torch.where(original, number, again)]
    kind = torch.where(slot < size, torch.where(original, SAMPLE, COPY), FILLER)
    return Rebalanced(source, kind.to(torch.uint8), order.fold(key, 2))


def rebalanced_data(data: Data, chosen: Rebalanced, augmentation: str, flip: bool) -> Data:
    """The rebalanced set of a client, as data to train on; its batches come in an order of their own."""
    x = data.x[chosen.source]
    copies = (chosen.kind == COPY).reshape(-1, *(1,) * (x.ndim - 1))
    return replace(
        data,
        x=torch.where(copies, varied(x, chosen.key, augmentation, flip), x),
        y=data.y[chosen.source],
        key=order.fold(data.key, order.REBALANCE),
        real=chosen.kind != FILLER,
        known=None,
    )


def varied(x: Tensor, key: Tensor, augmentation: str, flip: bool) -> Tensor:
    """Images (B, C, H, W) changed at random; samples that are not images stay as they are."""
    if augmentation == "none" or x.ndim != 4:
        return x
    if augmentation == "simple":
        return images.simple(x, key, flip)
    if x.dtype != torch.uint8:
        raise CoterieError("AutoAugment takes images of bytes; use augmentation simple or none")
    return images.auto(x, key)


def effective(chosen: Rebalanced) -> Tensor:
    """() D_e, samples of the set that are not copies, eq. (6)."""
    return (chosen.kind == SAMPLE).sum()
