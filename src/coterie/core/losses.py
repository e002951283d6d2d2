"""Losses per sample, (B,). `Batch.mean` averages them over the real samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import ops, tree


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return ops.current().cross_entropy(logits, y)  # (B,)


def balanced_cross_entropy(logits: Tensor, y: Tensor, counts: Tensor, strength: float = 1.0) -> Tensor:
    """(B,) for the balanced softmax p_k ∝ n_k exp(u_k) with class counts n (K,). Absent classes are excluded."""
    prior = torch.where(counts > 0, counts.clamp_min(1).log(), -1e9)  # finite: 0 times -inf would be nan
    return cross_entropy(logits + strength * prior, y)  # (B,)


def squared_error(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().mean(1)  # (B,), mean over the features


def kl_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """(B,) KL(teacher || student) of two sets of logits (B, K)."""
    target = F.log_softmax(teacher, 1)
    return (target.exp() * (target - F.log_softmax(logits, 1))).sum(1)


def attention_distance(maps: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """(B,) Σ ||q - q'||² over maps (B, C, H, W) of two networks; q: normalized energy per pixel."""
    parts = [(_attention(a) - _attention(b)).square().sum(1) for a, b in zip(maps, teacher, strict=True)]
    return sum(parts[1:], parts[0])


def _attention(a: Tensor) -> Tensor:
    return F.normalize(a.square().sum(1).flatten(1), dim=1)  # (B, H W)


def squared_distance(weights: object, anchor: object) -> Tensor:
    """||w - w'||² over all trained weights."""
    there = tree.flatten(anchor)
    parts = [(t - there[name]).square().sum() for name, t in tree.items(weights) if not tree.is_statistic(name)]
    return sum(parts[1:], parts[0])


def inner_product(weights: object, direction: object) -> Tensor:
    """<w, g> over all trained weights. Its gradient is g."""
    there = tree.flatten(direction)
    parts = [(t * there[name]).sum() for name, t in tree.items(weights) if not tree.is_statistic(name)]
    return sum(parts[1:], parts[0])
