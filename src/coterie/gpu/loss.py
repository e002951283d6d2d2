"""Cross entropy, and means that leave padding out, of many clients: one kernel each, and one for each gradient.

c: clients, B: samples, K: classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.gpu.registration import Operation

MAX_CLASSES = 4096  # one program reads all logits of a sample


def _cross_entropy_kernel(logits: Tensor, y: Tensor) -> Tensor:
    """Logits (c, B, K), labels (c, B) -> (c, B), in single precision at least."""
    from coterie.gpu.kernels import loss

    return loss.cross_entropy(logits, y)


def _cross_entropy_reference(logits: Tensor, y: Tensor) -> Tensor:
    scores = F.log_softmax(logits, -1, dtype=_wide(logits))
    return -scores.gather(-1, y[..., None]).squeeze(-1)


def _cross_entropy_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cross_entropy_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return cross_entropy_gradient(gradient, *ctx.saved_tensors), None


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


cross_entropy = Operation(
    "cross_entropy",
    _cross_entropy_kernel,
    _cross_entropy_reference,
    setup_context=_cross_entropy_context,
    backward=_cross_entropy_backward,
)


def _cross_entropy_gradient_kernel(gradient: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """The gradient in the logits (c, B, K), from that of the losses (c, B)."""
    from coterie.gpu.kernels import loss

    return loss.cross_entropy_slope(gradient, logits, y)


def _cross_entropy_gradient_reference(gradient: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(logits, -1, dtype=gradient.dtype)
    right = F.one_hot(y, logits.shape[-1])
    return (gradient[..., None] * (p - right)).to(logits.dtype)


cross_entropy_gradient = Operation(
    "cross_entropy_gradient", _cross_entropy_gradient_kernel, _cross_entropy_gradient_reference
)


def _mean_kernel(values: Tensor, real: Tensor) -> Tensor:
    """The mean (c,) of values (c, B) over real samples, a mask (c, B); 0 where there are none."""
    from coterie.gpu.kernels import loss

    return loss.mean(values, real)


def _mean_reference(values: Tensor, real: Tensor) -> Tensor:
    total = torch.where(real, values.to(_wide(values)), 0.0).sum(1)
    return (total / real.sum(1).clamp_min(1)).to(values.dtype)


def _mean_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _mean_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return masked_mean_gradient(gradient, *ctx.saved_tensors), None


masked_mean = Operation(
    "masked_mean", _mean_kernel, _mean_reference, setup_context=_mean_context, backward=_mean_backward
)


def _mean_gradient_kernel(gradient: Tensor, real: Tensor) -> Tensor:
    """The gradient in the values (c, B), from that of the means (c,)."""
    from coterie.gpu.kernels import loss

    return loss.mean_slope(gradient, real)


def _mean_gradient_reference(gradient: Tensor, real: Tensor) -> Tensor:
    share = gradient.to(_wide(gradient)) / real.sum(1).clamp_min(1)
    return torch.where(real, share[:, None], 0.0).to(gradient.dtype)


masked_mean_gradient = Operation("masked_mean_gradient", _mean_gradient_kernel, _mean_gradient_reference)
