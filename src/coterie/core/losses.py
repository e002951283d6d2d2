"""Losses, one value for each sample: means are taken by whoever knows which samples are real."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import mean_loss, stacks, tree


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    if stacks.side_by_side(logits) and logits.shape[1] <= mean_loss.MOST:
        return mean_loss.cross_entropy(logits, y)
    return -F.log_softmax(logits, 1).gather(1, y[:, None]).squeeze(1)  # (B,)


def balanced_cross_entropy(logits: Tensor, y: Tensor, counts: Tensor, strength: float = 1.0) -> Tensor:
    """Of the balanced softmax, p_k ~ n_k exp(u_k), for class counts n (K,). A class without samples takes no part."""
    prior = torch.where(counts > 0, counts.clamp_min(1).log(), -1e9)  # finite: a true -inf makes nan of a 0 beside it
    return cross_entropy(logits + strength * prior, y)  # (B,)


def squared_error(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().mean(1)  # (B,), mean over the features


def kl_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """(B,) KL(teacher || student) of what two predictors (B, K) say."""
    told = F.log_softmax(teacher, 1)
    return (told.exp() * (told - F.log_softmax(logits, 1))).sum(1)


def attention_distance(maps: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """(B,) Σ ||q - q'||² over maps (B, C, H, W) of two networks, q: where in an image there is how much energy."""
    parts = [(_attention(a) - _attention(b)).square().sum(1) for a, b in zip(maps, teacher, strict=True)]
    return sum(parts[1:], parts[0])


def _attention(a: Tensor) -> Tensor:
    return F.normalize(a.square().sum(1).flatten(1), dim=1)  # (B, H W)


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
