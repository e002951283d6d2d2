"""Fused versions of `coterie.core.ops` for many clients at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from coterie.core import ops
from coterie.core.data import Transform
from coterie.gpu import devices, loss, norm, optimizers, sampling


class Fused(ops.Operations):
    """Operations of one client that share their launches with all clients of a vmap.

    channels_last: keep the memory format of images, which the fused `draw` does not.
    """

    def __init__(self, channels_last: bool = False) -> None:
        self.channels_last = channels_last

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        if logits.shape[1] > loss.MAX_CLASSES:
            return super().cross_entropy(logits, y)
        losses: Tensor = loss.cross_entropy(logits[None], y[None])
        return losses.squeeze(0)

    def masked_mean(self, values: Tensor, real: Tensor) -> Tensor:
        means: Tensor = loss.masked_mean(values[None], real[None])
        return means.squeeze(0)

    def masked_batch_norm(
        self, real: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return norm.batch_norm(real, x, weight, bias, eps)

    def draw(self, x: Tensor, index: Tensor, bits: Tensor, transform: Transform) -> Tensor:
        if x.ndim != 4 or self.channels_last:
            return super().draw(x, index, bits, transform)
        drawn: Tensor = sampling.draw(x[None], index[None], bits[None], transform.crop, transform.flip)
        return drawn[0]

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
        if not weights:
            return [], []
        count, last = len(weights), velocity if momentum else ()
        step = (rate, active, lr, decay, momentum, count)
        made = optimizers.sgd_step(*step, *weights, *gradients, *last)
        return list(made[:count]), list(made[count:])

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
        count = len(weights)
        step = (scales, active, decay, beta1, beta2, eps, count)
        made = optimizers.adam_step(*step, *weights, *gradients, *first, *second)
        return list(made[:count]), list(made[count : 2 * count]), list(made[2 * count :])


def fused_on(device: torch.device, channels_last: bool = False) -> AbstractContextManager[object]:
    """Use the fused operations inside this block if Triton runs on this device."""
    return ops.use(Fused(channels_last)) if devices.runs_triton(device) else nullcontext()
