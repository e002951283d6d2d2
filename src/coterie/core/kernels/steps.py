"""Samples drawn for training, and steps of gradient descent."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # numbers of one tile
TOGETHER = 16  # tensors of one launch


def draw(x: Tensor, index: Tensor, bits: Tensor, crop: int, flip: bool) -> Tensor:
    """Images (c, n, C, H, W) -> those of index (c, B), cropped and flipped by random bits (c, B): (c, B, C, H, W)."""
    stack, _, channels, height, width = x.shape
    out = torch.empty(*index.shape, channels, height, width, dtype=x.dtype, device=x.device)
    across = triton.next_power_of_2(width)
    down = max(TILE // across, 1)
    rows = channels * height
    _draw[(index.shape[1], triton.cdiv(rows, down), stack)](
        x, index.contiguous(), bits.contiguous(), out, index.shape[1], *x.stride(),
        channels, height, width, crop, flip, down, across,
    )  # fmt: skip
    return out


def descend(
    weights: list[Tensor],
    slopes: list[Tensor],
    velocities: list[Tensor],
    rate: Tensor,
    active: Tensor | None,
    lr: float,
    decay: float,
    momentum: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """A step of gradient descent: the weights after it, and with momentum their velocities, which may be none before.

    active (rows,): those who take the step.
    """
    moved = [torch.empty_like(t) for t in slopes]
    speeds = [torch.empty_like(t) for t in slopes] if momentum else []
    for start in range(0, len(slopes), TOGETHER):
        tensors = [tuple(kind[start : start + TOGETHER]) for kind in (weights, slopes, velocities, moved, speeds)]
        counts = tuple(t.numel() for t in tensors[1])
        _descend[(sum(triton.cdiv(count, TILE) for count in counts),)](
            *tensors, counts, rate, rate if active is None else active.view(torch.uint8),
            1 if active is None else active.numel(), lr, decay, momentum, bool(velocities), active is not None, TILE,
        )  # fmt: skip
    return moved, speeds


@triton.jit(do_not_specialize=["batch"])
def _draw(
    x, index, bits, out, batch, stride_client, stride_image, stride_channel, stride_row, stride_column,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CROP: tl.constexpr, FLIP: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    image = client * batch + tl.program_id(0)
    line = (tl.program_id(1) * DOWN + tl.arange(0, DOWN))[:, None]  # (channel, row)
    column = tl.arange(0, ACROSS)[None, :]
    random = tl.load(bits + image)
    row = line % HEIGHT + (random % (2 * CROP + 1)).to(tl.int32) - CROP
    from_column = column
    if FLIP:
        from_column = tl.where(((random >> 40) & 1) == 1, WIDTH - 1 - column, column)
    from_column += ((random >> 20) % (2 * CROP + 1)).to(tl.int32) - CROP
    inside = (line < CHANNELS * HEIGHT) & (column < WIDTH)
    there = inside & (row >= 0) & (row < HEIGHT) & (from_column >= 0) & (from_column < WIDTH)
    at = client * stride_client + tl.load(index + image) * stride_image
    at += (line // HEIGHT) * stride_channel + row * stride_row + from_column * stride_column
    value = tl.load(x + at, mask=there, other=0)
    tl.store(out + image * (CHANNELS * HEIGHT * WIDTH) + line * WIDTH + column, value, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _descend(
    weights, slopes, velocities, moved, speeds, counts, rate, active, rows,
    LR: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr,
    ROLLING: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Tensors one behind the other: each block of numbers lies in one of them."""
    block, lr = tl.program_id(0), LR * tl.load(rate)
    first = 0
    for i in tl.static_range(len(slopes)):
        blocks = tl.cdiv(counts[i], SIZE)
        if (block >= first) & (block < first + blocks):
            at = (block - first).to(tl.int64) * SIZE + tl.arange(0, SIZE)
            inside = at < counts[i]
            w = tl.load(weights[i] + at, mask=inside)
            before = tl.zeros_like(w)
            if ROLLING:
                before = tl.load(velocities[i] + at, mask=inside)
            v = tl.load(slopes[i] + at, mask=inside) + DECAY * w + MOMENTUM * before
            after = w - lr * v
            if MASKED:
                on = tl.load(active + at // (counts[i] // rows), mask=inside, other=0) != 0
                after, v = tl.where(on, after, w), tl.where(on, v, before)
            if MOMENTUM != 0:
                tl.store(speeds[i] + at, v, mask=inside)
            tl.store(moved[i] + at, after, mask=inside)
        first += blocks
