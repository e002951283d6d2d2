"""Rebalanced sets (FedReG, Algorithm 3) with the same number of samples in every class of a client.

A class with too many samples is subsampled at random; one with too few is filled with augmented copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core import random
from coterie.core.batch import Data
from coterie.core.errors import CoterieError, unknown
from coterie.methods.fedreg import augment

THRESHOLDS = ("average", "median", "max", "second-smallest")
FILLER, SAMPLE, COPY = range(3)


class Rebalanced(NamedTuple):
    """Indices of the samples in the set. The images are computed from these when needed."""

    source: Tensor  # (R,) index of the client's sample
    kind: Tensor  # (R,) uint8: SAMPLE, COPY (augmented), or FILLER (padding)
    key: Tensor  # () random key of the copies


class Histograms(NamedTuple):
    before: Tensor  # (m, K) samples of each client and class
    after: Tensor  # (m, K) samples in the rebalanced sets


def threshold(samples: Tensor, rule: str) -> Tensor:
    """() t, the approximate size of every rebalanced set, from the sizes (m,) of all clients."""
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
    """(...) t_c, samples of each present class, from class counts (..., K)."""
    return (t // (counts > 0).sum(-1).clamp_min(1)).clamp_min(1)  # eq. (7), at least one


def histograms(counts: Tensor, rule: str = "average") -> Histograms:
    """From class counts (m, K) of all clients."""
    t = threshold(counts.sum(1), rule)
    return Histograms(counts, (counts > 0) * per_class(counts, t)[:, None])


def rebalance(data: Data, t: int) -> Rebalanced:
    """Algorithm 3 for one client."""
    key = random.derive(data.key, random.REBALANCE)
    counts = data.counts.long()  # (K,)
    wanted = per_class(counts, t)  # () t_c
    size = wanted * (counts > 0).sum()  # ()
    slot = torch.arange(max(t, data.classes), device=data.y.device)  # (R,), enough for any client
    place = slot % size  # the filler repeats the set
    label = (counts == 0).long().argsort(stable=True)[place // wanted]  # (R,) present classes in order
    number = place % wanted  # (R,) index within the class

    shuffled = random.shuffle(random.derive(key, 0), len(data.y), data.real)
    classes = data.y if data.real is None else torch.where(data.real, data.y, data.classes)
    grouped = shuffled[classes[shuffled].argsort(stable=True)]  # (n,) by class, shuffled within each
    first = (counts.cumsum(0) - counts)[label]  # (R,) start of its class
    again = random.bits(random.derive(key, 1), slot) % counts[label].clamp_min(1)
    original = number < counts[label]
    source = grouped[first + torch.where(original, number, again)]
    kind = torch.where(slot < size, torch.where(original, SAMPLE, COPY), FILLER)
    return Rebalanced(source, kind.to(torch.uint8), random.derive(key, 2))


def rebalanced_data(data: Data, chosen: Rebalanced, augmentation: str, flip: bool) -> Data:
    """The rebalanced set of a client as training data, shuffled independently of the original data."""
    x = data.x[chosen.source]
    copies = (chosen.kind == COPY).reshape(-1, *(1,) * (x.ndim - 1))
    return replace(
        data,
        x=torch.where(copies, varied(x, chosen.key, augmentation, flip), x),
        y=data.y[chosen.source],
        key=random.derive(data.key, random.REBALANCE),
        real=chosen.kind != FILLER,
        known=None,
    )


def varied(x: Tensor, key: Tensor, augmentation: str, flip: bool) -> Tensor:
    """Augmented images (B, C, H, W); samples that are not images do not change."""
    if augmentation == "none" or x.ndim != 4:
        return x
    if augmentation == "simple":
        return augment.simple(x, key, flip)
    if x.dtype != torch.uint8:
        raise CoterieError("augmentation=auto needs uint8 images; use simple or none")
    return augment.auto(x, key)


def effective(chosen: Rebalanced) -> Tensor:
    """() D_e, samples of the set that are not copies, eq. (6)."""
    return (chosen.kind == SAMPLE).sum()
