"""The operations that dominate a training step, in plain torch.

A backend may replace them while it computes: `coterie.gpu` has fused versions for many clients at once. Nothing in
`core` or in a method knows which version runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.context import holding

if TYPE_CHECKING:
    from coterie.core.data import Transform


class Operations:
    """Reference implementations, differentiable to any order."""

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B,), of logits (B, K) and labels (B,)."""
        return -F.log_softmax(logits, 1).gather(1, y[:, None]).squeeze(1)

    def masked_mean(self, values: Tensor, real: Tensor) -> Tensor:
        """() over the real samples (B,) of values (B,)."""
        return torch.where(real, values, 0.0).sum() / real.sum().clamp_min(1)

    def masked_batch_norm(
        self, real: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, C, L) normalized, and mean and unbiased variance (C,) of its real samples (B,)."""
        counts = (real | ~real.any()).to(x.dtype)
        share = (counts / counts.sum())[:, None]  # (B, 1)
        var, mean = torch.var_mean(x, 2, correction=0)  # (B, C) of each sample
        middle = (share * mean).sum(0)  # (C,)
        spread = (share * (var + (mean - middle).square())).sum(0)
        n = counts.sum() * x.shape[2]
        scale = (spread + eps).rsqrt() if weight is None else (spread + eps).rsqrt() * weight
        shift = -middle * scale if bias is None else bias - middle * scale
        return torch.addcmul(shift[:, None], x, scale[:, None]), middle, spread * n / (n - 1).clamp_min(1)

    def draw(self, x: Tensor, index: Tensor, bits: Tensor, transform: Transform) -> Tensor:
        """The samples of an index (B,), images varied by their random bits (B,)."""
        return augment(x[index], bits, transform) if transform.crop or transform.flip else x[index]

    def sgd_step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        velocity: Sequence[Tensor],
        rate: Tensor,
        active: Tensor | None,
        lr: float,
        decay: float,
        momentum: float,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and velocity after a step; no velocity without momentum.

        velocity: empty for zero. rate: () factor on lr. active: () False where nothing changes; None: it does.
        """
        step, moved, speed = lr * rate, [], []
        for at, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            if decay:
                g = g.add(w, alpha=decay)
            if momentum and velocity:
                g = g.add(velocity[at], alpha=momentum)
            if momentum:
                speed.append(g)
            moved.append(w.addcmul(g, step, value=-1))
        if active is None:
            return moved, speed
        before = velocity or [torch.zeros_like(t) for t in speed]
        return kept(active, moved, weights), kept(active, speed, before)

    def adam_step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        scales: Tensor,
        active: Tensor | None,
        decay: float,
        beta1: float,
        beta2: float,
        eps: float,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Weights and both moments after a step.

        scales: (3,) the learning rate over 1 - β1^t, (1 - β2^t)^1/2, and the factor on the weights before the step.
        """
        step, spread, shrink = scales.unbind()
        moved, means, squares = [], [], []
        for w, g, m, v in zip(weights, gradients, first, second, strict=True):
            if decay:
                g = g.add(w, alpha=decay)
            means.append(m.lerp(g, 1 - beta1))
            squares.append(v * beta2 + (1 - beta2) * g.square())
            moved.append(w * shrink - step * means[-1] / (squares[-1].sqrt() / spread + eps))
        if active is None:
            return moved, means, squares
        return kept(active, moved, weights), kept(active, means, first), kept(active, squares, second)


def kept(active: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """The new tensors, or the old ones where nothing changes."""
    return [torch.where(active, a, b) for a, b in zip(new, old, strict=True)]


def augment(x: Tensor, draws: Tensor, transform: Transform) -> Tensor:
    """Random crop and flip of images (B, C, H, W), from random bits (B,)."""
    height, width = x.shape[2:]
    pad, span = transform.crop, 2 * transform.crop + 1
    down, right, mirrored = draws % span, (draws >> 20) % span, (draws >> 40) & 1
    rows = torch.arange(height, device=x.device) + down[:, None]  # (B, H)
    columns = torch.arange(width, device=x.device)
    if transform.flip:
        columns = torch.where(mirrored[:, None] == 1, columns.flip(0), columns)
    columns = columns + right[:, None]  # (B, W)
    sample = torch.arange(len(x), device=x.device)[:, None, None]
    pixels = F.pad(x, (pad, pad, pad, pad)).movedim(1, 3)  # (B, H + 2 pad, W + 2 pad, C)
    return pixels[sample, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


_current: ContextVar[Operations] = ContextVar("operations", default=Operations())  # noqa: B039


def current() -> Operations:
    """The implementations in use."""
    return _current.get()


def use(operations: Operations) -> AbstractContextManager[Operations]:
    """Replace the implementations inside this block."""
    return holding(_current, operations)
