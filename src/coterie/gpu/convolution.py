"""Convolution, 2 x 2 maximum pooling and activation of many clients as one matrix product per client.

A pooled pixel is the largest of four convolutions, which all lie in one window of (k + 1) x (k + 1) pixels. The windows
are gathered once for all four (for k = 5, 2.8 times fewer numbers than without pooling), multiplied by the kernel in
its four places, and the largest of four columns is kept. Such products run near the peak speed of a GPU; grouped
convolutions with few channels per client do not.

c: clients, B: images, (C, H, W): an image, O: output channels, k: kernel size, (h, w): the pooled image,
M = B h w: windows, L: entries of a window, a 1 for the bias, and padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.gpu.dense import activated
from coterie.gpu.registration import Operation, join, split_clients

BUSY = 264  # tiles of 128 x 128 that keep a large GPU busy


class Geometry(NamedTuple):
    """Sizes of the images and of the windows on them."""

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
        """Entries of a window, a 1 for the bias, and zeros up to a multiple of 8."""
        return (self.entries + 8) // 8 * 8


def geometry(x: Tensor, weight: Tensor, padding: int) -> Geometry:
    """For images (c, B, C, H, W) and weights (c, O, C, k, k)."""
    channels, height, width = x.shape[2:]
    return Geometry(height, width, channels, weight.shape[-1], padding)


def _kernel(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, std: Tensor | None,
    padding: int, slope: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Images (c, B, C, H, W), weights (c, O, C, k, k), bias (c, O) -> (c, B, h, w, O).

    mean, std (C,): normalize raw pixels with these; None: pixels are used as they are. slope: of the activation below
    zero. dtype: of the product. Also returns what the gradient needs: which of the four is the largest
    (c, B, h, w, O), the windows (c, M, L) and the matrix of weights (c, L, 4 O).
    """
    from coterie.gpu.kernels import convolution

    shape = geometry(x, weight, padding)
    stack, batch, outputs = *x.shape[:2], weight.shape[1]
    windows = convolution.windows(x.flatten(0, 1), shape, dtype, mean, std).view(stack, -1, shape.length)
    matrix = convolution.four_places(weight, bias, shape, dtype).flatten(2)
    four = torch.bmm(windows, matrix).view(-1, 4, outputs)
    out, winner = convolution.pool(four, slope)
    pooled = (stack, batch, shape.rows, shape.columns, outputs)
    return out.view(pooled), winner.view(pooled), windows, matrix


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, std: Tensor | None,
    padding: int, slope: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape = geometry(x, weight, padding)
    stack, batch, outputs = *x.shape[:2], weight.shape[1]
    if mean is not None and std is not None:
        unit = 255 if x.dtype == torch.uint8 else 1
        x = (x.to(mean.dtype) / unit - mean[:, None, None]) / std[:, None, None]
    seen = F.unfold(x.flatten(0, 1).to(weight.dtype), shape.side, padding=padding, stride=2)  # (c B, C side², h w)
    seen = seen.view(stack * batch, shape.channels, shape.side**2, -1).permute(0, 3, 2, 1).flatten(2)
    windows = F.pad(with_one(seen), (0, shape.length - shape.entries - 1)).to(dtype).view(stack, -1, shape.length)
    places = [F.pad(weight, (g % 2, 1 - g % 2, g // 2, 1 - g // 2)) for g in range(4)]  # (c, O, C, side, side)
    kernels = torch.stack(places, 5).permute(0, 3, 4, 2, 5, 1).flatten(1, 3)  # (c, side² C, 4, O)
    rows = torch.cat([kernels, bias[:, None, None].expand(stack, 1, 4, outputs)], 1)
    matrix = F.pad(rows, (0, 0, 0, 0, 0, shape.length - shape.entries - 1)).to(dtype).flatten(2)
    best, winner = torch.bmm(windows, matrix).view(stack, -1, 4, outputs).max(2)
    pooled = (stack, batch, shape.rows, shape.columns, outputs)
    return activated(best, best, slope).view(pooled), winner.to(torch.uint8).view(pooled), windows, matrix


def with_one(seen: Tensor) -> Tensor:
    """Append a 1, which the bias is multiplied by."""
    return F.pad(seen, (0, 1), value=1.0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _, _, padding, slope, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)
    ctx.form = list(geometry(x, weight, padding)), slope, weight.dtype


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, bias, *x = conv_pool_gradient(gradient, *ctx.saved_tensors, *ctx.form, ctx.needs_input_grad[0])
    return (x[0] if x else None), weight, bias, None, None, None, None, None


def _vmap(
    function: Any, info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor, *form: Any
) -> tuple[Any, Any]:
    if dims[1] is None and dims[2] is None and len(weight) == 1:  # shared weights: all images are one batch
        images = x.movedim(dims[0], 0).flatten(0, 2)[None]
        *made, matrix = function(images, weight, bias, *form)
        return (*(split_clients(t[0], info.batch_size)[:, None] for t in made), matrix), (0, 0, 0, None)
    return join(lambda *rows: function(*rows, *form), info, dims[:3], x, weight, bias)  # mean and std: all clients'


conv_pool = Operation("conv_pool", _kernel, _reference, vmap=_vmap, setup_context=_setup_context, backward=_backward)


def _gradient_kernel(
    gradient: Tensor, out: Tensor, winner: Tensor, windows: Tensor, matrix: Tensor,
    sizes: list[int], slope: float, dtype: torch.dtype, wanted: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients in weight and bias, and in the images (c, B, C, H, W) if wanted, from that of out (c, B, h, w, O).

    sizes: of `Geometry`. dtype: of the weights.
    """
    from coterie.gpu.kernels import convolution

    stack, channels = len(gradient), gradient.shape[-1]
    shape = Geometry(*sizes)
    gradient, out, winner = (t.contiguous() for t in (gradient, out, winner))
    four = convolution.unpool(gradient, out, winner, slope).view(stack, -1, 4 * channels)
    weights = convolution.from_four_places(transposed_product(windows, four), shape, dtype)
    if not wanted:
        return list(weights)
    x = convolution.fold(torch.bmm(four, matrix.mT).view(-1, shape.length), shape, gradient.shape[:2].numel())
    return [*weights, split_clients(x, stack).movedim(4, 2)]


def _gradient_reference(
    gradient: Tensor, out: Tensor, winner: Tensor, windows: Tensor, matrix: Tensor,
    sizes: list[int], slope: float, dtype: torch.dtype, wanted: bool,
) -> list[Tensor]:  # fmt: skip
    stack, batch, outputs = *gradient.shape[:2], gradient.shape[-1]
    shape = Geometry(*sizes)
    through = activated(gradient, out, slope)
    four = torch.stack([torch.where(winner == g, through, 0.0) for g in range(4)], 4).view(stack, -1, 4 * outputs)
    product = torch.bmm(windows.mT, four).view(stack, -1, 4, outputs)  # (c, L, 4, O)
    places = product[:, : shape.entries].reshape(stack, shape.side, shape.side, shape.channels, 4, outputs)
    moved = [places[:, g // 2 :, g % 2 :][:, : shape.kernel, : shape.kernel, :, g] for g in range(4)]  # (c, k, k, C, O)
    weight = torch.stack(moved).sum(0).permute(0, 4, 3, 1, 2).contiguous()
    weights = [weight.to(dtype), product[:, shape.entries].sum(1).to(dtype)]
    if not wanted:
        return weights
    patches = torch.bmm(four, matrix.mT)[..., : shape.entries].reshape(stack * batch, -1, shape.side**2, shape.channels)
    size = (shape.height, shape.width)
    x = F.fold(patches.permute(0, 3, 2, 1).flatten(1, 2), size, shape.side, padding=shape.padding, stride=2)
    x = x.movedim(1, 3).contiguous()  # channels last
    return [*weights, split_clients(x, stack).movedim(4, 2)]


conv_pool_gradient = Operation("conv_pool_gradient", _gradient_kernel, _gradient_reference)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Split-K matrix product aᵀ b of a (c, M, L) and b (c, M, N): parts (c, P, L, N), still to be summed over P."""
    stack, rows, length = a.shape
    tiles = stack * -(-length // 128) * -(-b.shape[2] // 128)
    parts = next(p for p in range(max(BUSY // tiles, 1), 0, -1) if rows % p == 0)
    a, b = (t.view(stack * parts, rows // parts, -1) for t in (a, b))
    return split_clients(torch.bmm(a.mT, b), stack)
