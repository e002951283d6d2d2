"""Draw samples for training. Tiles have (channel, row) pairs down and columns across."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a tile


def draw(x: Tensor, index: Tensor, bits: Tensor, crop: int, flip: bool) -> Tensor:
    """Images (c, n, C, H, W), index and random bits (c, B) -> (c, B, C, H, W), as `ops.augment` crops and flips."""
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
