"""Bias and activation of a dense layer, and their gradient. Tiles have samples down and outputs across."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.gpu.kernels.activation import activated

TILE = 1024  # elements of a tile
NARROW = 32  # outputs across, where a program reads all samples of a client


def shift_(out: Tensor, bias: Tensor, slope: float) -> None:
    """Add the bias (c, O) to out (c, B, O) and activate it, in place. slope: of the activation below zero."""
    stack, batch, outputs = out.shape
    across = min(triton.next_power_of_2(outputs), 128)
    down = TILE // across
    cells = (triton.cdiv(stack * batch, down), triton.cdiv(outputs, across))
    _shift[cells](out, bias.contiguous(), stack * batch, batch, outputs, slope, down, across)


def slopes(gradient: Tensor, out: Tensor | None, slope: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of `shift_` in its input (c, B, O) and in the bias (c, O). out: None for no activation."""
    stack, batch, outputs = gradient.shape
    gradient = gradient.contiguous()
    through = gradient if out is None else torch.empty_like(gradient)
    bias = torch.empty(stack, outputs, dtype=dtype, device=gradient.device)
    across = min(triton.next_power_of_2(outputs), NARROW)
    down = min(triton.next_power_of_2(max(batch, 1)), TILE // across)
    _slopes[(stack, triton.cdiv(outputs, across))](
        gradient, gradient if out is None else out.contiguous(), through, bias, batch, outputs,
        slope, out is not None, down, across,
    )  # fmt: skip
    return through, bias


@triton.jit(do_not_specialize=["count", "batch"])
def _shift(out, bias, count, batch, outputs, SLOPE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    row = (tl.program_id(0) * DOWN + tl.arange(0, DOWN))[:, None]  # (client, sample)
    output = (tl.program_id(1) * ACROSS + tl.arange(0, ACROSS))[None, :]
    inside = (row < count) & (output < outputs)
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    at = row.to(tl.int64) * outputs + output
    value = tl.load(out + at, mask=inside, other=0.0).to(wide)
    value += tl.load(bias + row // batch * outputs + output, mask=inside, other=0.0).to(wide)
    tl.store(out + at, activated(value, value, SLOPE).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch"])
def _slopes(
    gradient, out, through, bias, batch, outputs,
    SLOPE: tl.constexpr, ACTIVATED: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)  # (A,)
    wide: tl.constexpr = tl.float64 if bias.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((DOWN, ACROSS), wide)
    for start in range(0, batch, DOWN):
        sample = (start + tl.arange(0, DOWN))[:, None]
        inside = (sample < batch) & (output < outputs)[None, :]
        at = (client * batch + sample) * outputs + output[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(wide)
        if ACTIVATED:
            g = activated(g, tl.load(out + at, mask=inside, other=0.0), SLOPE)
            tl.store(through + at, g.to(through.dtype.element_ty), mask=inside)
        total += g
    tl.store(bias + client * outputs + output, tl.sum(total, 0).to(bias.dtype.element_ty), mask=output < outputs)
