"""BatchNorm that leaves padding out.

x (c, B, C, L) is read as rows of L pixels, one for each client, sample and channel. Moments are computed per row, then
combined per client. Tiles have rows down and pixels across, or a client's samples down and channels across.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a tile
NARROW = 16  # channels across, where one compiled kernel serves layers of every width


def moments(x: Tensor, real: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """μ, r = (σ² + ε)^-1/2 and the unbiased σ² (c, C) of the real samples (c, B) of a dense x (c, B, C, L).

    Also the weight p (c, B) of each pixel of a sample in them. Where no sample is real all count.
    """
    stack, batch, channels, length = x.shape
    means, spreads = x.new_empty(2, stack, batch, channels)
    down, across = _row_tile(x)
    _row_moments[(triton.cdiv(means.numel(), down),)](x, means, spreads, *_rows(x), down, across)
    mean, inverse, unbiased = (x.new_empty(stack, channels) for _ in range(3))  # outputs of an op share no memory
    share = x.new_empty(stack, batch)
    down, across = _sample_tile(batch)
    _moments[(triton.cdiv(channels, across), stack)](
        means, spreads, real.contiguous().view(torch.uint8), mean, inverse, unbiased, share,
        batch, channels, length, eps, down, across,
    )  # fmt: skip
    return mean, inverse, unbiased, share


def normalize(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """γ r (x - μ) + β for a dense x (c, B, C, L) and the others (c, C)."""
    out = torch.empty_like(x)
    down, across = _row_tile(x)
    _normalize[(triton.cdiv(x.shape[:3].numel(), down), triton.cdiv(x.shape[3], across))](
        x, mean, inverse, mean if weight is None else weight.contiguous(), mean if bias is None else bias.contiguous(),
        out, *_rows(x), weight is not None, bias is not None, down, across,
    )  # fmt: skip
    return out


def slopes(gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (c, C) of `normalize` in weight and bias. gradient and x (c, B, C, L): dense, of equal strides."""
    stack, batch, channels, _ = x.shape
    sums, products = x.new_empty(2, stack, batch, channels)
    down, across = _row_tile(x)
    _row_slopes[(triton.cdiv(sums.numel(), down),)](
        gradient, x, mean.contiguous(), sums, products, *_rows(x), down, across
    )
    weight, bias = (x.new_empty(stack, channels) for _ in range(2))
    down, across = _sample_tile(batch)
    _slopes[(triton.cdiv(channels, across), stack)](
        sums, products, inverse.contiguous(), weight, bias, batch, channels, down, across
    )
    return weight, bias


def unnormalize(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, share: Tensor, weight: Tensor | None,
    weight_slope: Tensor, bias_slope: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of `normalize` in x, including its effect on μ and r."""
    out = torch.empty_like(x)
    down, across = _row_tile(x)
    mean, inverse, share = (t.contiguous() for t in (mean, inverse, share))
    _unnormalize[(triton.cdiv(x.shape[:3].numel(), down), triton.cdiv(x.shape[3], across))](
        gradient, x, mean, inverse, share, mean if weight is None else weight.contiguous(), weight_slope, bias_slope,
        out, *_rows(x), weight is not None, down, across,
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> tuple[int, ...]:
    """Number of rows, samples per client, channels, pixels, and the strides of x."""
    return x.shape[:3].numel(), *x.shape[1:], *x.stride()


def _row_tile(x: Tensor) -> tuple[int, int]:
    """Rows and pixels of a tile; few pixels where those of a channel are not adjacent in memory."""
    longest = 2 * TILE if x.stride(3) == 1 else 32
    across = min(triton.next_power_of_2(x.shape[3]), longest)
    return min(max(TILE // across, 1), 128), across


def _sample_tile(batch: int) -> tuple[int, int]:
    """Samples and channels of a tile: all samples of a client, some channels."""
    down = triton.next_power_of_2(batch)
    return down, min(max(TILE // down, 1), NARROW)


@triton.jit
def _first(row, batch, channels, stride_client, stride_sample, stride_channel):
    """Offset of the first pixel of a row."""
    sample = row // channels
    client, sample, channel = sample // batch, sample % batch, row % channels
    at = client.to(tl.int64) * stride_client + sample.to(tl.int64) * stride_sample
    return at + channel.to(tl.int64) * stride_channel


@triton.jit
def _own(row, batch, channels):
    """Index of a row's client and channel in (c, C)."""
    return row // (batch * channels) * channels + row % channels


@triton.jit(do_not_specialize=["count", "batch"])
def _row_moments(
    x, means, spreads, count, batch, channels, length, stride_client, stride_sample, stride_channel, stride_pixel,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    pixel = tl.arange(0, ACROSS)[None, :]  # (1, A)
    first = x + _first(row, batch, channels, stride_client, stride_sample, stride_channel)[:, None]
    value = tl.zeros((DOWN, ACROSS), x.dtype.element_ty)
    for start in range(0, length, ACROSS):
        inside = (row < count)[:, None] & (start + pixel < length)
        value += tl.load(first + (start + pixel) * stride_pixel, mask=inside, other=0.0)
    mean = tl.sum(value, 1) / length
    value = tl.zeros((DOWN, ACROSS), x.dtype.element_ty)
    for start in range(0, length, ACROSS):
        inside = (row < count)[:, None] & (start + pixel < length)
        centered = tl.load(first + (start + pixel) * stride_pixel, mask=inside, other=0.0) - mean[:, None]
        value += tl.where(inside, centered * centered, 0.0)
    tl.store(means + row, mean, mask=row < count)
    tl.store(spreads + row, tl.sum(value, 1) / length, mask=row < count)


@triton.jit(do_not_specialize=["batch"])
def _moments(
    means, spreads, real, mean, inverse, unbiased, share, batch, channels, length,
    EPS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    sample = tl.arange(0, DOWN)  # (D,)
    channel = tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)  # (A,)
    counts = tl.load(real + client * batch + sample, mask=sample < batch, other=0).to(tl.int32)
    none = tl.sum(counts, 0) == 0
    counts = tl.where(none & (sample < batch), 1, counts)
    n = tl.sum(counts, 0).to(mean.dtype.element_ty)
    inside = (counts > 0)[:, None] & (channel < channels)[None, :]
    at = (client * batch + sample)[:, None] * channels + channel[None, :]
    means_of = tl.load(means + at, mask=inside, other=0.0)
    middle = tl.sum(means_of, 0) / n
    apart = means_of - middle[None, :]
    spread = tl.load(spreads + at, mask=inside, other=0.0) + apart * apart
    spread = tl.sum(tl.where(inside, spread, 0.0), 0) / n
    pixels = n * length
    to = client * channels + channel
    tl.store(mean + to, middle, mask=channel < channels)
    tl.store(inverse + to, tl.rsqrt(spread + EPS), mask=channel < channels)
    tl.store(unbiased + to, spread * pixels / tl.maximum(pixels - 1, 1.0), mask=channel < channels)
    if tl.program_id(0) == 0:  # once for all channels
        tl.store(share + client * batch + sample, counts / pixels, mask=sample < batch)


@triton.jit(do_not_specialize=["count", "batch"])
def _normalize(
    x, mean, inverse, weight, bias, out,
    count, batch, channels, length, stride_client, stride_sample, stride_channel, stride_pixel,
    SCALED: tl.constexpr, SHIFTED: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    pixel = (tl.program_id(1) * ACROSS + tl.arange(0, ACROSS))[None, :]  # (1, A)
    own, there = _own(row, batch, channels), row < count
    inside = there[:, None] & (pixel < length)
    at = _first(row, batch, channels, stride_client, stride_sample, stride_channel)[:, None] + pixel * stride_pixel
    scale = tl.load(inverse + own, mask=there, other=0.0)
    if SCALED:
        scale *= tl.load(weight + own, mask=there, other=0.0)
    value = (tl.load(x + at, mask=inside) - tl.load(mean + own, mask=there, other=0.0)[:, None]) * scale[:, None]
    if SHIFTED:
        value += tl.load(bias + own, mask=there, other=0.0)[:, None]
    tl.store(out + at, value, mask=inside)


@triton.jit(do_not_specialize=["count", "batch"])
def _row_slopes(
    gradient, x, mean, sums, products,
    count, batch, channels, length, stride_client, stride_sample, stride_channel, stride_pixel,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    pixel = tl.arange(0, ACROSS)[None, :]  # (1, A)
    first = _first(row, batch, channels, stride_client, stride_sample, stride_channel)[:, None]
    middle = tl.load(mean + _own(row, batch, channels), mask=row < count, other=0.0)[:, None]
    total = tl.zeros((DOWN, ACROSS), x.dtype.element_ty)
    product = tl.zeros((DOWN, ACROSS), x.dtype.element_ty)
    for start in range(0, length, ACROSS):
        inside = (row < count)[:, None] & (start + pixel < length)
        at = first + (start + pixel) * stride_pixel
        g = tl.load(gradient + at, mask=inside, other=0.0)
        total += g
        product += g * (tl.load(x + at, mask=inside, other=0.0) - middle)
    tl.store(sums + row, tl.sum(total, 1), mask=row < count)
    tl.store(products + row, tl.sum(product, 1), mask=row < count)


@triton.jit(do_not_specialize=["batch"])
def _slopes(
    sums, products, inverse, weight, bias, batch, channels, DOWN: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    sample = tl.arange(0, DOWN)[:, None]
    channel = tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)  # (A,)
    inside = (sample < batch) & (channel < channels)[None, :]
    at = (client * batch + sample) * channels + channel[None, :]
    to = client * channels + channel
    scale = tl.load(inverse + to, mask=channel < channels, other=0.0)
    product = tl.sum(tl.load(products + at, mask=inside, other=0.0), 0)
    tl.store(weight + to, scale * product, mask=channel < channels)
    tl.store(bias + to, tl.sum(tl.load(sums + at, mask=inside, other=0.0), 0), mask=channel < channels)


@triton.jit(do_not_specialize=["count", "batch"])
def _unnormalize(
    gradient, x, mean, inverse, share, weight, weight_slope, bias_slope, out,
    count, batch, channels, length, stride_client, stride_sample, stride_channel, stride_pixel,
    SCALED: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """γ r (g - p (Σ g + r (x - μ) Σ r g (x - μ))): the sums are the slopes of bias and weight."""
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    pixel = (tl.program_id(1) * ACROSS + tl.arange(0, ACROSS))[None, :]  # (1, A)
    own, there = _own(row, batch, channels), row < count
    inside = there[:, None] & (pixel < length)
    at = _first(row, batch, channels, stride_client, stride_sample, stride_channel)[:, None] + pixel * stride_pixel
    p = tl.load(share + row // channels, mask=there, other=0.0)
    r = tl.load(inverse + own, mask=there, other=0.0)
    shift = p * tl.load(bias_slope + own, mask=there, other=0.0)
    slant = p * r * tl.load(weight_slope + own, mask=there, other=0.0)
    centered = tl.load(x + at, mask=inside) - tl.load(mean + own, mask=there, other=0.0)[:, None]
    value = tl.load(gradient + at, mask=inside) - shift[:, None] - slant[:, None] * centered
    if SCALED:
        r *= tl.load(weight + own, mask=there, other=0.0)
    tl.store(out + at, value * r[:, None], mask=inside)
