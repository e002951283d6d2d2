"""Dense layers of many clients: matrix products by torch; bias and activation in one kernel, their gradient in another.

c: clients, B: samples, I: inputs, O: outputs. slope: of the activation below zero; 1 for no activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.gpu.registration import Operation, join, split_clients

IDENTITY = 1.0  # the slope of no activation


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of matrix products with this weight: autocast's, where it is enabled. It leaves float64 alone."""
    device = weight.device.type
    lowered = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lowered else weight.dtype


def activated(value: Tensor, sign: Tensor, slope: float) -> Tensor:
    """value where sign is positive, elsewhere slope times it. A slope of 0 makes -inf zero, as in torch's ReLU."""
    if slope == 0:
        return torch.where(sign <= 0, 0.0, value)
    return torch.where(sign > 0, value, value * slope)


def _kernel(x: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Tensor:
    """Samples (c, B, I), weights (c, O, I), bias (c, O) -> (c, B, O)."""
    from coterie.gpu.kernels import dense

    out = torch.bmm(x, weight.mT)
    dense.shift_(out, bias, slope)
    return out


def _reference(x: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.bmm(x, weight.mT).to(wide) + bias[:, None].to(wide)
    return activated(out, out, slope).to(x.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.slope = inputs
    ctx.save_for_backward(x, weight, None if ctx.slope == IDENTITY else output)
    ctx.dtype = bias.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:3]
    found = iter(dense_gradient(gradient, *ctx.saved_tensors, ctx.slope, ctx.dtype, list(wanted)))
    return *(next(found) if each else None for each in wanted), None


def _vmap(
    function: Any, info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor, slope: float
) -> Any:
    if dims[1] is None and dims[2] is None and len(weight) == 1:  # shared weights: all samples are one batch
        samples = x.movedim(dims[0], 0).flatten(0, 2)[None]
        out = function(samples, weight, bias, slope).squeeze(0)
        return split_clients(out, info.batch_size)[:, None], 0
    return join(function, info, dims, x, weight, bias, slope)


dense = Operation("dense", _kernel, _reference, vmap=_vmap, setup_context=_setup_context, backward=_backward)


def _gradient_kernel(
    gradient: Tensor, x: Tensor, weight: Tensor, out: Tensor | None,
    slope: float, dtype: torch.dtype, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients in x (c, B, I), weight (c, O, I) and bias (c, O) that are wanted. out: None for no activation."""
    from coterie.gpu.kernels import dense

    bias = gradient  # not used unless it is computed here
    if wanted[2] or out is not None:
        gradient, bias = dense.slopes(gradient, out, slope, dtype)
    return _products(gradient, x, weight, bias, wanted)


def _gradient_reference(
    gradient: Tensor, x: Tensor, weight: Tensor, out: Tensor | None,
    slope: float, dtype: torch.dtype, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    wide = torch.promote_types(dtype, torch.float32)
    through = gradient.to(wide)
    if out is not None:
        through = activated(through, out, slope)
    return _products(through.to(gradient.dtype), x, weight, through.sum(1).to(dtype), wanted)


def _products(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, wanted: list[bool]) -> list[Tensor]:
    """gradient: (c, B, O) before bias and activation."""
    found = [torch.bmm(gradient, weight)] if wanted[0] else []
    if wanted[1]:
        found.append(torch.bmm(gradient.mT, x))
    return [*found, bias] if wanted[2] else found


dense_gradient = Operation("dense_gradient", _gradient_kernel, _gradient_reference)
