"""The steps of a fused convolution before and after its matrix product; `coterie.gpu.convolution` has the symbols.

Images are read by their strides, so they may have any memory layout; results are channels last. In a tile, windows and
pixels run down, entries of a window and channels across.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.gpu.convolution import Geometry
from coterie.gpu.kernels.activation import activated

TILE = 2048  # elements of a tile
NARROW = 16  # channels across, where one compiled kernel serves layers of every width


def windows(x: Tensor, shape: Geometry, dtype: torch.dtype, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Images (N, C, H, W) -> windows (N h w, L). With mean and std (C,), pixels are normalized as they are read."""
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
    """The adjoint of `windows`: (N h w, L) -> (N, H, W, C)."""
    out = patches.new_empty(images, shape.height, shape.width, shape.channels)
    across = triton.next_power_of_2(shape.channels)
    down = max(TILE // across // 4, 1)
    count = images * shape.height * shape.width
    _fold[(triton.cdiv(count, down),)](
        patches, out, count, *shape, shape.rows, shape.columns, shape.length, down, across
    )
    return out


def pool(four: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """(M, 4, O) -> the largest of the four (M, O), activated, and its index among them."""
    count, _, channels = four.shape
    out = four.new_empty(count, channels)
    winner = torch.empty(count, channels, dtype=torch.uint8, device=four.device)
    _pool[_cells(count, channels)](four, out, winner, count, channels, slope, TILE // NARROW, NARROW)
    return out, winner


def unpool(gradient: Tensor, out: Tensor, winner: Tensor, slope: float) -> Tensor:
    """The gradient of `pool`: (..., O), M pixels in total -> (M, 4, O)."""
    channels = gradient.shape[-1]
    count = gradient.numel() // channels
    four = gradient.new_empty(count, 4, channels)
    _unpool[_cells(count, channels)](gradient, out, winner, four, count, channels, slope, TILE // NARROW, NARROW)
    return four


def _cells(count: int, channels: int) -> tuple[int, int]:
    return triton.cdiv(count, TILE // NARROW), triton.cdiv(channels, NARROW)


def four_places(weight: Tensor, bias: Tensor, shape: Geometry, dtype: torch.dtype) -> Tensor:
    """Weights (c, O, C, k, k) and bias (c, O) as a matrix (c, L, 4, O).

    Column (g, o) is kernel o in the g-th of its four places in a window; the bias multiplies the 1 of a window.
    """
    stack, outputs = bias.shape
    matrix = torch.empty(stack, shape.length, 4, outputs, dtype=dtype, device=weight.device)
    across = triton.next_power_of_2(4 * outputs)
    down = max(TILE // across, 1)
    _four_places[(stack, triton.cdiv(shape.length, down))](
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
    """The adjoint of `four_places`, of a matrix (c, P, L, 4 O) summed over its P parts."""
    stack, parts, outputs = len(matrix), matrix.shape[1], matrix.shape[3] // 4
    weight = torch.empty(stack, outputs, shape.channels, shape.kernel, shape.kernel, dtype=dtype, device=matrix.device)
    bias = torch.empty(stack, outputs, dtype=dtype, device=matrix.device)
    across = triton.next_power_of_2(outputs)
    down = max(TILE // across // 8, 1)
    numbers = shape.channels * shape.kernel**2
    _from_four_places[(stack, triton.cdiv(numbers + 1, down))](
        matrix, weight, bias, parts, shape.channels, shape.kernel, outputs, shape.length, down, across
    )
    return weight, bias


@triton.jit(do_not_specialize=["count"])
def _windows(
    x, mean, std, out, count, unit, stride_image, stride_channel, stride_row, stride_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr,
    NORMALIZED: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
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
    if NORMALIZED:
        shift = tl.load(mean + channel)
        scale = 1 / (unit * tl.load(std + channel))
        value = (value.to(shift.dtype) - (unit * shift)[None, :]) * scale[None, :]
    value = tl.where(there, value, 0.0)
    value = tl.where((entry == SIDE * SIDE * CHANNELS)[None, :], 1.0, value)  # it multiplies the bias
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
    g = activated(g, tl.load(out + at, mask=inside, other=0.0), SLOPE).to(four.dtype.element_ty)
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
    entry = (tl.program_id(1) * DOWN + tl.arange(0, DOWN))[:, None]
    place = tl.arange(0, ACROSS)[None, :]
    client = tl.program_id(0).to(tl.int64)
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
    number = (tl.program_id(1) * DOWN + tl.arange(0, DOWN))[:, None]  # (channel, i, j), or the bias
    output = tl.arange(0, ACROSS)[None, :]
    client = tl.program_id(0).to(tl.int64)
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
