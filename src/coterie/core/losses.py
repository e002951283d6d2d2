"""Losses, one value for each sample: means are taken by whoever knows which samples are real."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")  # (B,)


def squared_error(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().mean(1)  # (B,), mean over the features


def squared_distance(weights: object, anchor: object) -> Tensor:
    """||w - w'||², over everything that is trained."""
    there = tree.flatten(anchor)
    parts = [(t - there[name]).square().sum() for name, t in tree.items(weights) if not tree.is_statistic(name)]
    return sum(parts[1:], parts[0])


def inner_product(weights: object, direction: object) -> Tensor:
    """<w, g>, over everything that is trained. Its gradient is the direction."""
    there = tree.flatten(direction)
    parts = [(t * there[name]).sum() for name, t in tree.items(weights) if not tree.is_statistic(name)]
    return sum(parts[1:], parts[0])
