"""Cross entropy and its mean over real samples, of many clients at once: one kernel each, and one for each gradient.

The functions here have an axis of clients, c, in front; under vmap the new axis joins it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core.stacks import call, together

MOST = 4096  # classes; a program sees all of a sample


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """(B,), of logits (B, K) and labels (B,)."""
    losses: Tensor = call(CrossEntropy, logits[None], y[None])
    return losses.squeeze(0)


def mean(values: Tensor, real: Tensor) -> Tensor:
    """() over the real samples (B,) of values (B,)."""
    means: Tensor = call(Mean, values[None], real[None])
    return means.squeeze(0)


class CrossEntropy(torch.autograd.Function):
    """Logits (c, B, K), labels (c, B) -> (c, B)."""

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> Tensor:
        from coterie.core import loss_kernels

        return loss_kernels.cross_entropy(logits, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return call(CrossEntropyGradient, gradient, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *given: Any) -> Any:
        return together(CrossEntropy, info, dims, given)


class CrossEntropyGradient(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        from coterie.core import loss_kernels

        return loss_kernels.cross_entropy_slope(gradient, logits, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # nobody asks for the gradient of a gradient

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *given: Any) -> Any:
        return together(CrossEntropyGradient, info, dims, given)


class Mean(torch.autograd.Function):
    """Values (c, B), of which some are real (c, B) -> (c,)."""

    @staticmethod
    def forward(values: Tensor, real: Tensor) -> Tensor:
        from coterie.core import loss_kernels

        return loss_kernels.mean(values, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return call(MeanGradient, gradient, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *given: Any) -> Any:
        return together(Mean, info, dims, given)


class MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, real: Tensor) -> Tensor:
        from coterie.core import loss_kernels

        return loss_kernels.mean_slope(gradient, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # nobody asks for the gradient of a gradient

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *given: Any) -> Any:
        return together(MeanGradient, info, dims, given)
