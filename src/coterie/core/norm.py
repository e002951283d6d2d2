"""BatchNorm of many clients at once that leaves padding out, in three kernels on a GPU, and three for its gradient.

The functions here have an axis of clients, c, in front; under vmap the new axis joins it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coterie.core.stacks import Last, Stacked, call


def batch_norm(
    real: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, C, L) normalised, and mean and unbiased variance (C,) of its real samples (B,)."""
    scale, shift = (None if t is None else t[None].to(x.dtype) for t in (weight, bias))
    out, mean, unbiased, *_ = call(BatchNorm, x[None], real[None], scale, shift, eps)
    return out.squeeze(0), mean.squeeze(0), unbiased.squeeze(0)


class BatchNorm(Stacked):
    """x (c, B, C, L), real (c, B), weight γ and bias β (c, C) -> γ r (x - μ) + β, with r = (σ² + ε)^-1/2."""

    @staticmethod
    def forward(x: Tensor, real: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        """With μ and the unbiased σ² (c, C), and what the gradient needs: r (c, C), a sample's share p (c, B)."""
        from coterie.core.kernels import norm

        x = norm.dense(x)
        mean, inverse, unbiased, share = norm.moments(x, real, eps)
        return norm.normalise(x, mean, inverse, weight, bias), mean, unbiased, inverse, share

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, weight, bias, _ = inputs
        _, mean, unbiased, inverse, share = output
        ctx.mark_non_differentiable(mean, unbiased, inverse, share)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean, inverse, share, weight)
        ctx.scaled, ctx.shifted = weight is not None, bias is not None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias = call(BatchNormGradient, gradient, *ctx.saved_tensors)
        return x, None, weight if ctx.scaled else None, bias if ctx.shifted else None, None


class BatchNormGradient(Last):
    """Of x (c, B, C, L), weight and bias (c, C), from that of what came out."""

    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, share: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        from coterie.core.kernels import norm

        x = norm.dense(x)
        gradient = norm.as_lies(gradient, x)
        slopes = norm.slopes(gradient, x, mean, inverse)  # of weight and bias
        return norm.unnormalise(gradient, x, mean, inverse, share, weight, *slopes), *slopes
