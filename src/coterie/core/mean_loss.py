"""Cross entropy and its mean over real samples, of many clients at once: one kernel each, and one for each gradient.

The functions here have an axis of clients, c, in front; under vmap the new axis joins it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coterie.core.stacks import Last, Stacked, call

MOST = 4096  # classes; a program sees all of a sample


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """(B,), of logits (B, K) and labels (B,)."""
    losses: Tensor = call(CrossEntropy, logits[None], y[None])
    return losses.squeeze(0)


def mean(values: Tensor, real: Tensor) -> Tensor:
    """() over the real samples (B,) of values (B,)."""
    means: Tensor = call(Mean, values[None], real[None])
    return means.squeeze(0)


class CrossEntropy(Stacked):
    """Logits (c, B, K), labels (c, B) -> (c, B)."""

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> Tensor:
        from coterie.core.kernels import loss

        return loss.cross_entropy(logits, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return call(CrossEntropyGradient, gradient, *ctx.saved_tensors), None


class CrossEntropyGradient(Last):
    @staticmethod
    def forward(gradient: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        from coterie.core.kernels import loss

        return loss.cross_entropy_slope(gradient, logits, y)


class Mean(Stacked):
    """Values (c, B), of which some are real (c, B) -> (c,)."""

    @staticmethod
    def forward(values: Tensor, real: Tensor) -> Tensor:
        from coterie.core.kernels import loss

        return loss.mean(values, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return call(MeanGradient, gradient, *ctx.saved_tensors), None


class MeanGradient(Last):
    @staticmethod
    def forward(gradient: Tensor, real: Tensor) -> Tensor:
        from coterie.core.kernels import loss

        return loss.mean_slope(gradient, real)
