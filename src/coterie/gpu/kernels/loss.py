"""Cross entropy and the mean over real samples.

Tiles of cross entropy have samples down and all classes across. One program computes the mean of a client.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 512  # elements of a tile; one of cross entropy has at least one sample


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Logits (..., K), labels (...) -> (...), in single precision at least."""
    out = torch.empty(y.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    cells, shape = _samples(logits)
    _cross_entropy[cells](logits.contiguous(), y.contiguous(), out, *shape)
    return out


def cross_entropy_slope(gradient: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """The gradient of `cross_entropy` in the logits."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    cells, shape = _samples(logits)
    _cross_entropy_slope[cells](gradient.contiguous(), logits, y.contiguous(), out, *shape)
    return out


def mean(values: Tensor, real: Tensor) -> Tensor:
    """The mean (c,) of values (c, B) over real samples (c, B); 0 where there are none."""
    out = values.new_empty(len(values))
    _mean[(len(values),)](values.contiguous(), _bytes(real), out, values.shape[1], TILE)
    return out


def mean_slope(gradient: Tensor, real: Tensor) -> Tensor:
    """The gradient of `mean` in the values (c, B), from that of the means (c,)."""
    out = torch.empty(real.shape, dtype=gradient.dtype, device=gradient.device)
    _mean_slope[(len(real),)](gradient.contiguous(), _bytes(real), out, real.shape[1], TILE)
    return out


def _bytes(real: Tensor) -> Tensor:
    return real.contiguous().view(torch.uint8)


def _samples(logits: Tensor) -> tuple[tuple[int], tuple[int, ...]]:
    """The grid, and the arguments of a kernel: samples, classes, and the tile."""
    count, classes = logits.shape[:-1].numel(), logits.shape[-1]
    across = triton.next_power_of_2(classes)
    down = max(TILE // across, 1)
    return (triton.cdiv(count, down),), (count, classes, down, across)


@triton.jit
def _shifted(logits, sample, classes, WIDE: tl.constexpr, ACROSS: tl.constexpr):
    """The logits (D, A) of these samples minus the largest of each; -inf beyond the last class."""
    k = tl.arange(0, ACROSS)[None, :]
    at = sample.to(tl.int64)[:, None] * classes + k
    u = tl.load(logits + at, mask=k < classes, other=float("-inf")).to(WIDE)
    return u - tl.max(u, 1)[:, None]


@triton.jit(do_not_specialize=["count"])
def _cross_entropy(logits, y, out, count, classes, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    sample = tl.minimum(row, count - 1)
    u = _shifted(logits, sample, classes, out.dtype.element_ty, ACROSS)
    right = tl.arange(0, ACROSS)[None, :] == tl.load(y + sample)[:, None]
    value = tl.log(tl.sum(tl.exp(u), 1)) - tl.sum(tl.where(right, u, 0.0), 1)
    tl.store(out + row, value, mask=row < count)


@triton.jit(do_not_specialize=["count"])
def _cross_entropy_slope(gradient, logits, y, out, count, classes, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    k = tl.arange(0, ACROSS)[None, :]
    sample = tl.minimum(row, count - 1)
    p = tl.exp(_shifted(logits, sample, classes, gradient.dtype.element_ty, ACROSS))
    p = p / tl.sum(p, 1)[:, None]
    right = k == tl.load(y + sample)[:, None]
    value = tl.load(gradient + sample)[:, None] * tl.where(right, p - 1, p)
    at = row.to(tl.int64)[:, None] * classes + k
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(row < count)[:, None] & (k < classes))


@triton.jit(do_not_specialize=["batch"])
def _mean(values, real, out, batch, SIZE: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    total, n = tl.zeros((SIZE,), wide), tl.zeros((SIZE,), tl.int32)
    for start in range(0, batch, SIZE):
        sample = start + tl.arange(0, SIZE)
        there = tl.load(real + client * batch + sample, mask=sample < batch, other=0) != 0
        total += tl.load(values + client * batch + sample, mask=there, other=0.0).to(wide)
        n += there.to(tl.int32)
    value = tl.sum(total, 0) / tl.maximum(tl.sum(n, 0), 1).to(wide)
    tl.store(out + client, value.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["batch"])
def _mean_slope(gradient, real, out, batch, SIZE: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    n = tl.zeros((SIZE,), tl.int32)
    for start in range(0, batch, SIZE):
        sample = start + tl.arange(0, SIZE)
        n += tl.load(real + client * batch + sample, mask=sample < batch, other=0).to(tl.int32)
    value = tl.load(gradient + client).to(wide) / tl.maximum(tl.sum(n, 0), 1).to(wide)
    for start in range(0, batch, SIZE):
        sample = start + tl.arange(0, SIZE)
        there = tl.load(real + client * batch + sample, mask=sample < batch, other=0) != 0
        tl.store(
            out + client * batch + sample, tl.where(there, value, 0.0).to(out.dtype.element_ty), mask=sample < batch
        )
