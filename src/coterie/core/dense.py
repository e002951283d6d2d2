"""Dense layers of many clients at once: products by torch, bias and activation in one kernel, their gradient in one.

The functions here have an axis of clients, c, in front; under vmap the new axis joins it.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from coterie.core.stacks import Last, Stacked, call, compute_type, unfold_stack

NONE = 1.0  # the slope of no activation


def fuse(part: nn.Module) -> nn.Module:
    """The dense layers of a chain, or the one that this is, fused with the activations behind them."""
    if fusible(part):
        return FusedLinear(part, NONE)
    if is_chain(part):
        for at, layer in enumerate(part):
            behind = part[at + 1] if at + 1 < len(part) else None
            if fusible(layer) and (slope := slope_of(behind)) is not None:
                part[at], part[at + 1] = FusedLinear(layer, slope), nn.Identity()
            else:
                part[at] = fuse(layer)
    return part


def is_chain(part: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward


def fusible(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a dense layer as torch has it."""
    return type(layer) is nn.Linear and layer.bias is not None and untouched(layer)


def untouched(layer: nn.Module) -> bool:
    """Whether nobody listens to it: hooks would not be called."""
    return not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def slope_of(activation: nn.Module | None) -> float | None:
    """Below zero; None: it is no activation that can be fused."""
    if activation is None or not untouched(activation):
        return None
    if type(activation) is nn.ReLU:
        return 0.0
    if type(activation) is nn.LeakyReLU and activation.negative_slope >= 0:  # what comes out has the same sign
        return activation.negative_slope
    return None


class FusedLinear(nn.Linear):
    """A dense layer and its activation, of this slope below zero."""

    def __init__(self, layer: nn.Linear, slope: float) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        dtype = compute_type(self.weight)
        rows = x.reshape(-1, self.in_features).to(dtype)
        out: Tensor = call(Dense, rows[None], self.weight[None].to(dtype), self.bias[None], self.slope)
        return out.squeeze(0).view(*x.shape[:-1], self.out_features)


class Dense(Stacked):
    """Samples (c, B, I), weights (c, O, I), bias (c, O) -> (c, B, O)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Tensor:
        from coterie.core.kernels import dense

        out = torch.bmm(x, weight.mT)
        dense.shift_(out, bias, slope)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.slope = inputs
        ctx.save_for_backward(x, weight, None if ctx.slope == NONE else output)
        ctx.dtype = bias.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        made = iter(call(DenseGradient, gradient, *ctx.saved_tensors, ctx.slope, ctx.dtype, wanted))
        return *(next(made) if one else None for one in wanted), None

    @classmethod
    def vmap(cls, info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Any:
        if dims[1] is None and dims[2] is None and len(weight) == 1:  # one network for all: their samples are one batch
            samples = x.movedim(dims[0], 0).flatten(0, 2)[None]
            out = call(Dense, samples, weight, bias, slope).squeeze(0)
            return unfold_stack(out, info.batch_size)[:, None], 0
        return super().vmap(info, dims, x, weight, bias, slope)


class DenseGradient(Last):
    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, weight: Tensor, out: Tensor | None,
        slope: float, dtype: torch.dtype, wanted: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Of the samples, the weights and the bias, those that are wanted."""
        from coterie.core.kernels import dense

        made = []
        if wanted[2] or out is not None:
            gradient, bias = dense.slopes(gradient, out, slope, dtype)
        if wanted[0]:
            made.append(torch.bmm(gradient, weight))
        if wanted[1]:
            made.append(torch.bmm(gradient.mT, x))
        if wanted[2]:
            made.append(bias)
        return tuple(made)
