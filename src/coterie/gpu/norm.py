"""BatchNorm of many clients that leaves padding out: three kernels, and three for its gradient.

c: clients, B: samples, C: channels, L: pixels. r = (σ² + ε)^-1/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.gpu.registration import Operation


def dense(x: Tensor) -> Tensor:
    """x with the strides of a new tensor: x itself, or a contiguous copy if it has gaps or overlaps in memory."""
    return x if torch.empty_like(x).stride() == x.stride() else x.contiguous()


def with_strides(t: Tensor, x: Tensor) -> Tensor:
    """t with the strides of x."""
    return t if t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def _kernel(
    x: Tensor, real: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x (c, B, C, L), mask of real samples (c, B), weight γ and bias β (c, C) -> γ r (x - μ) + β.

    Also returns μ and the unbiased σ² (c, C), and for the gradient r (c, C) and the weight p (c, B) of each pixel of a
    sample in μ. Where no sample is real all count.
    """
    from coterie.gpu.kernels import norm

    x = dense(x)
    mean, inverse, unbiased, share = norm.moments(x, real, eps)
    return norm.normalize(x, mean, inverse, weight, bias), mean, unbiased, inverse, share


def _reference(
    x: Tensor, real: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = dense(x)
    counts = real | ~real.any(1, keepdim=True)
    pixels = (counts.sum(1) * x.shape[3]).to(x.dtype)[:, None]  # (c, 1)
    counted = counts[:, :, None, None]
    mean = torch.where(counted, x, 0.0).sum((1, 3)) / pixels
    centered = x - _per_channel(mean)
    variance = torch.where(counted, centered, 0.0).square().sum((1, 3)) / pixels
    inverse = (variance + eps).rsqrt()
    out = centered * _per_channel(inverse if weight is None else inverse * weight)
    out = out if bias is None else out + _per_channel(bias)
    return out, mean, variance * pixels / (pixels - 1).clamp_min(1), inverse, counts / pixels


def _per_channel(t: Tensor) -> Tensor:
    """(c, C) -> (c, 1, C, 1)."""
    return t[:, None, :, None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weight, bias, _ = inputs
    _, mean, unbiased, inverse, share = output
    ctx.mark_non_differentiable(mean, unbiased, inverse, share)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mean, inverse, share, weight)
    ctx.scaled, ctx.shifted = weight is not None, bias is not None


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, bias = batch_norm_gradient(gradient, *ctx.saved_tensors)
    return x, None, weight if ctx.scaled else None, bias if ctx.shifted else None, None


masked_batch_norm = Operation(
    "masked_batch_norm", _kernel, _reference, setup_context=_setup_context, backward=_backward
)


def _gradient_kernel(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, share: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient in x (c, B, C, L), weight and bias (c, C), from that of the output (c, B, C, L)."""
    from coterie.gpu.kernels import norm

    x = dense(x)
    gradient = with_strides(gradient, x)
    slopes = norm.slopes(gradient, x, mean, inverse)  # of weight and bias
    return norm.unnormalize(gradient, x, mean, inverse, share, weight, *slopes), *slopes


def _gradient_reference(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, share: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """γ r (g - p (Σ g + r (x - μ) Σ r g (x - μ)))."""
    x = dense(x)
    gradient = with_strides(gradient, x)
    centered, p = x - _per_channel(mean), share[:, :, None, None]
    in_bias = gradient.sum((1, 3))
    in_weight = (gradient * centered).sum((1, 3)) * inverse
    in_x = gradient - p * (_per_channel(in_bias) + _per_channel(inverse * in_weight) * centered)
    return in_x * _per_channel(inverse if weight is None else inverse * weight), in_weight, in_bias


batch_norm_gradient = Operation("masked_batch_norm_gradient", _gradient_kernel, _gradient_reference)


def batch_norm(
    real: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, C, L) of one client normalized, and mean and unbiased variance (C,) of its real samples (B,)."""
    scale, shift = (None if t is None else t[None].to(x.dtype) for t in (weight, bias))
    out, mean, unbiased, *_ = masked_batch_norm(x[None], real[None], scale, shift, eps)
    return out.squeeze(0), mean.squeeze(0), unbiased.squeeze(0)
