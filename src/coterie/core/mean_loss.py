"""Cross entropy of many clients at once, in one kernel on a GPU, and one for its gradient.

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
