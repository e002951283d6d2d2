"""What a fused convolution does around its matrix product, BatchNorm, draws and steps, as Triton kernels.

A window is the patch of (k + 1) x (k + 1) pixels that one pooled pixel sees: its four convolutions lie in it.
Images are read by their strides, so any order in memory will do; what is written lies channels last.
Indices of windows and pixels are vectors down a tile, those of a window's entries and channels vectors across.

BatchNorm sees x (c, B, C, L), L pixels, as rows of pixels, one for each client, sample and channel. A row has its own
moments; a client's are put together from them. Its tiles have rows down and pixels across, or a client's samples down
and channels across.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # numbers of one tile
TOGETHER = 16  # tensors of one launch
NARROW = 16  # channels across, where one compiled kernel serves layers of every width


class Geometry(NamedTuple):
    """Of images, and of the windows on them."""

    height: int
    width: int
    channels: int
    kernel: int
    padding: int

    @property
    def side(self) -> int:
        return self.kernel + 1

    @property
    def rows(self) -> int:
        return (self.height + 2 * self.padding - self.kernel + 1) // 2

    @property
    def columns(self) -> int:
        return (self.width + 2 * self.padding - self.kernel + 1) // 2

    @property
    def entries(self) -> int:
        return self.side * self.side * self.channels

    @property
    def length(self) -> int:
        """Entries of a window, a one for the bias, and zeros up to whole vectors of memory."""
        return (self.entries + 8) // 8 * 8


def windows(x: Tensor, shape: Geometry, dtype: torch.dtype, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Images (N, C, H, W) -> (N rows columns, length). With mean and std (C,), pixels are normalised on the way."""
    count = len(x) * shape.rows * shape.columns
    out = torch.empty(count, shape.length, dtype=dtype, device=x.device)
    across = min(128, triton.next_power_of_2(shape.length))
    down = TILE // across
    unit = 255 if x.dtype == torch.uint8 else 1
    cells = (triton.cdiv(count, down), triton.cdiv(shape.length, across))
    _windows[cells](
        x, x if mean is None else mean, x if std is None else std, out, count, unit, *x.stride(),
        *shape, shape.rows, shape.columns, shape.length, mean is not None, down, across,
    )  # fmt: skip
    return out


def fold(patches: Tensor, shape: Geometry, images: int) -> Tensor:
    """The adjoint of windows: (N rows columns, length) -> (N, H, W, C)."""
    out = patches.new_empty(images, shape.height, shape.width, shape.channels)
    across = triton.next_power_of_2(shape.channels)
    down = max(TILE // across // 4, 1)
    count = images * shape.height * shape.width
    _fold[(triton.cdiv(count, down),)](
        patches, out, count, *shape, shape.rows, shape.columns, shape.length, down, across
    )
    return out


def pool(four: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """(M, 4, C) -> the largest of the four (M, C), activated, and which it was."""
    count, _, channels = four.shape
    out = four.new_empty(count, channels)
    winner = torch.empty(count, channels, dtype=torch.uint8, device=four.device)
    _pool[_cells(count, channels)](four, out, winner, count, channels, slope, TILE // NARROW, NARROW)
    return out, winner


def unpool(gradient: Tensor, out: Tensor, winner: Tensor, slope: float) -> Tensor:
    """The gradient of pool: (..., C), M pixels in all -> (M, 4, C)."""
    channels = gradient.shape[-1]
    count = gradient.numel() // channels
    four = gradient.new_empty(count, 4, channels)
    _unpool[_cells(count, channels)](gradient, out, winner, four, count, channels, slope, TILE // NARROW, NARROW)
    return four


def _cells(count: int, channels: int) -> tuple[int, int]:
    return triton.cdiv(count, TILE // NARROW), triton.cdiv(channels, NARROW)


def four_places(weight: Tensor, bias: Tensor, shape: Geometry, dtype: torch.dtype) -> Tensor:
    """Weights (c, O, C, k, k) and bias (c, O) as a matrix (c, length, 4, O).

    Column (g, o) is kernel o in the g-th of its four places in a window; the bias is the weight of the one.
    """
    stack, outputs = bias.shape
    matrix = torch.empty(stack, shape.length, 4, outputs, dtype=dtype, device=weight.device)
    across = triton.next_power_of_2(4 * outputs)
    down = max(TILE // across, 1)
    _four_places[(triton.cdiv(shape.length, down), stack)](
        weight.contiguous(),
        bias.contiguous(),
        matrix,
        shape.channels,
        shape.kernel,
        outputs,
        shape.length,
        down,
        across,
    )
    return matrix


def from_four_places(matrix: Tensor, shape: Geometry, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The adjoint of four_places, of a matrix (c, parts, length, 4 O) to be summed over its parts."""
    stack, parts, outputs = len(matrix), matrix.shape[1], matrix.shape[3] // 4
    weight = torch.empty(stack, outputs, shape.channels, shape.kernel, shape.kernel, dtype=dtype, device=matrix.device)
    bias = torch.empty(stack, outputs, dtype=dtype, device=matrix.device)
    across = triton.next_power_of_2(outputs)
    down = max(TILE // across // 8, 1)
    numbers = shape.channels * shape.kernel**2
    _from_four_places[(triton.cdiv(numbers + 1, down), stack)](
        matrix, weight, bias, parts, shape.channels, shape.kernel, outputs, shape.length, down, across
    )
    return weight, bias


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


def dense(x: Tensor) -> Tensor:
    """x in an order of memory that a new tensor can have too: as it lies, unless it is part of another one."""
    return x if torch.empty_like(x).stride() == x.stride() else x.contiguous()


def as_lies(t: Tensor, x: Tensor) -> Tensor:
    """t in the order of memory of x."""
    return t if t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def moments(x: Tensor, real: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the real samples (c, B) of x (c, B, C, L): μ, r = (σ² + ε)^-1/2 and the unbiased σ² (c, C).

    And the share p (c, B) that each pixel of a sample has in them. Where no sample is real all count.
    """
    stack, batch, channels, length = x.shape
    means, spreads = x.new_empty(2, stack, batch, channels)
    down, across = _row_tile(x)
    _row_moments[(triton.cdiv(means.numel(), down),)](x, means, spreads, *_rows(x), down, across)
    mean, inverse, unbiased = x.new_empty(3, stack, channels)
    share = x.new_empty(stack, batch)
    down, across = _sample_tile(batch)
    _moments[(triton.cdiv(channels, across), stack)](
        means, spreads, real.contiguous().view(torch.uint8), mean, inverse, unbiased, share,
        batch, channels, length, eps, down, across,
    )  # fmt: skip
    return mean, inverse, unbiased, share


def normalise(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """γ r (x - μ) + β of a dense x (c, B, C, L), the others (c, C)."""
    out = torch.empty_like(x)
    down, across = _row_tile(x)
    _normalise[(triton.cdiv(x.shape[:3].numel(), down), triton.cdiv(x.shape[3], across))](
        x, mean, inverse, mean if weight is None else weight.contiguous(), mean if bias is None else bias.contiguous(),
        out, *_rows(x), weight is not None, bias is not None, down, across,
    )  # fmt: skip
    return out


def norm_slopes(gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (c, C) of normalise in weight and bias. gradient and x (c, B, C, L) are dense, in one order."""
    stack, batch, channels, _ = x.shape
    sums, products = x.new_empty(2, stack, batch, channels)
    down, across = _row_tile(x)
    _row_slopes[(triton.cdiv(sums.numel(), down),)](
        gradient, x, mean.contiguous(), sums, products, *_rows(x), down, across
    )
    weight, bias = x.new_empty(2, stack, channels)
    down, across = _sample_tile(batch)
    _slopes[(triton.cdiv(channels, across), stack)](
        sums, products, inverse.contiguous(), weight, bias, batch, channels, down, across
    )
    return weight, bias


def unnormalise(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, share: Tensor, weight: Tensor | None,
    weight_slope: Tensor, bias_slope: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of normalise in x, which μ and r depend on."""
    out = torch.empty_like(x)
    down, across = _row_tile(x)
    mean, inverse, share = (t.contiguous() for t in (mean, inverse, share))
    _unnormalise[(triton.cdiv(x.shape[:3].numel(), down), triton.cdiv(x.shape[3], across))](
        gradient, x, mean, inverse, share, mean if weight is None else weight.contiguous(), weight_slope, bias_slope,
        out, *_rows(x), weight is not None, down, across,
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> tuple[int, ...]:
    """How many there are, samples of a client, channels, pixels, and where they lie in memory."""
    return x.shape[:3].numel(), *x.shape[1:], *x.stride()


def _row_tile(x: Tensor) -> tuple[int, int]:
    """Rows and pixels; few pixels where those of one channel do not lie side by side."""
    longest = 2 * TILE if x.stride(3) == 1 else 32
    across = min(triton.next_power_of_2(x.shape[3]), longest)
    return min(max(TILE // across, 1), 128), across


def _sample_tile(batch: int) -> tuple[int, int]:
    """All samples, and some channels."""
    down = triton.next_power_of_2(batch)
    return down, min(max(TILE // down, 1), NARROW)


@triton.jit(do_not_specialize=["count"])
def _windows(
    x, mean, std, out, count, unit, stride_image, stride_channel, stride_row, stride_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr,
    NORMALISED: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    SIDE: tl.constexpr = KERNEL + 1
    window = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    entry = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)  # (A,)
    image, pixel = window // (ROWS * COLUMNS), window % (ROWS * COLUMNS)
    row, column = pixel // COLUMNS * 2 - PADDING, pixel % COLUMNS * 2 - PADDING  # of the window's first pixel
    channel, i, j = entry % CHANNELS, entry // (CHANNELS * SIDE), entry // CHANNELS % SIDE
    inside = (window < count)[:, None] & (entry < LENGTH)[None, :]
    there = inside & (entry < SIDE * SIDE * CHANNELS)[None, :]
    if PADDING > 0:
        y, z = row[:, None] + i[None, :], column[:, None] + j[None, :]
        there = there & (y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH)
    first = x + (image.to(tl.int64) * stride_image + row * stride_row + column * stride_column)
    offset = i * stride_row + j * stride_column + channel * stride_channel
    value = tl.load(first[:, None] + offset[None, :], mask=there, other=0)
    if NORMALISED:
        shift = tl.load(mean + channel)
        scale = 1 / (unit * tl.load(std + channel))
        value = (value.to(shift.dtype) - (unit * shift)[None, :]) * scale[None, :]
    value = tl.where(there, value, 0.0)
    value = tl.where((entry == SIDE * SIDE * CHANNELS)[None, :], 1.0, value)  # the bias is the weight of this one
    to = out + window.to(tl.int64) * LENGTH
    tl.store(to[:, None] + entry[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _fold(
    patches, out, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    SIDE: tl.constexpr = KERNEL + 1
    pixel = tl.program_id(0) * DOWN + tl.arange(0, DOWN)  # (D,)
    channel = tl.arange(0, ACROSS)[None, :]  # (1, A)
    row, column = pixel // WIDTH % HEIGHT + PADDING, pixel % WIDTH + PADDING
    image = (pixel // (WIDTH * HEIGHT)).to(tl.int64)
    inside = (pixel < count)[:, None] & (channel < CHANNELS)
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    value = tl.zeros((DOWN, ACROSS), wide)
    for up in tl.static_range((SIDE + 1) // 2):  # the windows that see this pixel
        for left in tl.static_range((SIDE + 1) // 2):
            r, c = row // 2 - up, column // 2 - left
            i, j = row - 2 * r, column - 2 * c
            seen = (r >= 0) & (r < ROWS) & (c >= 0) & (c < COLUMNS) & (i < SIDE) & (j < SIDE)
            at = ((image * ROWS + r) * COLUMNS + c) * LENGTH + (i * SIDE + j) * CHANNELS
            value += tl.load(patches + at[:, None] + channel, mask=inside & seen[:, None], other=0.0).to(wide)
    at = pixel.to(tl.int64)[:, None] * CHANNELS + channel
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activated(value, sign, SLOPE: tl.constexpr):
    """value where sign is positive, else SLOPE times it; of a slope of zero infinity is zero too, as in torch."""
    if SLOPE == 0:
        return tl.where(sign <= 0, 0.0, value)
    else:  # noqa: RET505
        return tl.where(sign > 0, value, value * SLOPE)


@triton.jit(do_not_specialize=["count"])
def _pool(
    four, out, winner, count, channels, SLOPE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    pixel = (tl.program_id(0) * DOWN + tl.arange(0, DOWN)).to(tl.int64)[:, None]
    channel = (tl.program_id(1) * ACROSS + tl.arange(0, ACROSS))[None, :]
    inside = (pixel < count) & (channel < channels)
    first = four + pixel * (4 * channels) + channel
    best = tl.load(first, mask=inside, other=0.0)
    which = tl.zeros((DOWN, ACROSS), tl.int32)
    for group in tl.static_range(1, 4):
        value = tl.load(first + group * channels, mask=inside, other=0.0)
        better = (value > best) | (value != value)  # nan wins, as in torch
        best, which = tl.where(better, value, best), tl.where(better, group, which)
    best = activated(best, best, SLOPE).to(four.dtype.element_ty)
    at = pixel * channels + channel
    tl.store(out + at, best, mask=inside)
    tl.store(winner + at, which.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _unpool(
    gradient, out, winner, four, count, channels, SLOPE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    pixel = (tl.program_id(0) * DOWN + tl.arange(0, DOWN)).to(tl.int64)[:, None]
    channel = (tl.program_id(1) * ACROSS + tl.arange(0, ACROSS))[None, :]
    inside = (pixel < count) & (channel < channels)
    at = pixel * channels + channel
    g = tl.load(gradient + at, mask=inside, other=0.0)
    positive = tl.load(out + at, mask=inside, other=0.0) > 0
    g = tl.where(positive, g, (g * SLOPE).to(g.dtype))
    which = tl.load(winner + at, mask=inside, other=0).to(tl.int32)
    first = four + pixel * (4 * channels) + channel
    for group in tl.static_range(4):
        tl.store(first + group * channels, tl.where(which == group, g, 0.0), mask=inside)


@triton.jit
def _four_places(
    weight, bias, matrix,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, OUTPUTS: tl.constexpr, LENGTH: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    SIDE: tl.constexpr = KERNEL + 1
    entry = (tl.program_id(0) * DOWN + tl.arange(0, DOWN))[:, None]
    place = tl.arange(0, ACROSS)[None, :]
    client = tl.program_id(1).to(tl.int64)
    group, output = place // OUTPUTS, place % OUTPUTS
    i, j = entry // (CHANNELS * SIDE) - group // 2, entry // CHANNELS % SIDE - group % 2
    inside = (entry < LENGTH) & (place < 4 * OUTPUTS)
    there = inside & (entry < SIDE * SIDE * CHANNELS) & (i >= 0) & (i < KERNEL) & (j >= 0) & (j < KERNEL)
    at = (((client * OUTPUTS + output) * CHANNELS + entry % CHANNELS) * KERNEL + i) * KERNEL + j
    value = tl.load(weight + at, mask=there, other=0.0)
    one = inside & (entry == SIDE * SIDE * CHANNELS)
    value = tl.where(one, tl.load(bias + client * OUTPUTS + output, mask=inside, other=0.0), value)
    at = (client * LENGTH + entry) * (4 * OUTPUTS) + place
    tl.store(matrix + at, value.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def _from_four_places(
    matrix, weight, bias, PARTS: tl.constexpr,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, OUTPUTS: tl.constexpr, LENGTH: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    SIDE: tl.constexpr = KERNEL + 1
    NUMBERS: tl.constexpr = CHANNELS * KERNEL * KERNEL
    number = (tl.program_id(0) * DOWN + tl.arange(0, DOWN))[:, None]  # (channel, i, j), or the bias
    output = tl.arange(0, ACROSS)[None, :]
    client = tl.program_id(1).to(tl.int64)
    channel, i, j = number // (KERNEL * KERNEL), number // KERNEL % KERNEL, number % KERNEL
    inside = (number <= NUMBERS) & (output < OUTPUTS)
    wide: tl.constexpr = tl.float64 if weight.dtype.element_ty == tl.float64 else tl.float32
    value = tl.zeros((DOWN, ACROSS), wide)
    for part in range(PARTS):
        for group in tl.static_range(4):
            entry = ((i + group // 2) * SIDE + j + group % 2) * CHANNELS + channel
            entry = tl.where(number == NUMBERS, SIDE * SIDE * CHANNELS, entry)
            at = (((client * PARTS + part) * LENGTH + entry) * 4 + group) * OUTPUTS + output
            value += tl.load(matrix + at, mask=inside, other=0.0).to(wide)
    value = value.to(weight.dtype.element_ty)
    tl.store(weight + (client * OUTPUTS + output) * NUMBERS + number, value, mask=inside & (number < NUMBERS))
    tl.store(bias + client * OUTPUTS + output + 0 * number, value, mask=inside & (number == NUMBERS))


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


@triton.jit
def _first(row, batch, channels, stride_client, stride_sample, stride_channel):
    """Where the first pixel of a row lies."""
    sample = row // channels
    client, sample, channel = sample // batch, sample % batch, row % channels
    at = client.to(tl.int64) * stride_client + sample.to(tl.int64) * stride_sample
    return at + channel.to(tl.int64) * stride_channel


@triton.jit
def _own(row, batch, channels):
    """The place of its client and channel among (c, C)."""
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
        centred = tl.load(first + (start + pixel) * stride_pixel, mask=inside, other=0.0) - mean[:, None]
        value += tl.where(inside, centred * centred, 0.0)
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
def _normalise(
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
def _unnormalise(
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
    centred = tl.load(x + at, mask=inside) - tl.load(mean + own, mask=there, other=0.0)[:, None]
    value = tl.load(gradient + at, mask=inside) - shift[:, None] - slant[:, None] * centred
    if SCALED:
        r *= tl.load(weight + own, mask=there, other=0.0)
    tl.store(out + at, value * r[:, None], mask=inside)
