"""The heavy parts of training for many clients at once, in few kernels on a GPU.

Convolution, 2 x 2 maximum pooling and activation become one product of matrices for each client. A pooled pixel is
the largest of four convolutions, which all lie in one window of (k + 1) x (k + 1) pixels. So the windows are gathered
once for all four (for k = 5, 2.8 times fewer numbers than without pooling), multiplied with the kernel in its four
places side by side, and the largest of four columns is kept. Such products run near the speed of a GPU; convolutions
with few channels, in a group for each client, do not.

All functions here have an axis of clients, c, in front; under vmap the new axis joins it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.core import dense, stacks
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.stacks import Last, Stacked, call, compute_type, in_front, unfold_stack

FULL = 264  # tiles of 128 x 128 that keep a large GPU busy


class FusedModel(Model):
    """Its first layer takes raw samples."""

    def normalise(self, x: Tensor) -> Tensor:
        return x


def fuse(model: Model) -> Model:
    """The same network, dense layers fused with their activations. Weights keep their names and shapes.

    Where it begins with a convolution, pooling and an activation, all such are fused too.
    """
    encoder, head = (dense.fuse(copy.deepcopy(part)) for part in (model.encoder, model.head))
    if not dense.is_chain(encoder) or not fusible(encoder, 0):
        return replace(model, encoder=encoder, head=head)
    for at in range(len(encoder)):
        if fusible(encoder, at):
            raw = (model.mean, model.std) if at == 0 else None
            encoder[at] = FusedConv(cast(nn.Conv2d, encoder[at]), encoder[at + 2], raw)
            encoder[at + 1], encoder[at + 2] = nn.Identity(), nn.Identity()
    rest = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in ("encoder", "head")}
    return FusedModel(encoder, head, **rest)


def fusible(layers: nn.Sequential, at: int) -> bool:
    """Whether a convolution, 2 x 2 pooling and an activation stand here."""
    if at + 2 >= len(layers):
        return False
    conv, pooling, activation = layers[at], layers[at + 1], layers[at + 2]
    return (
        type(conv) is nn.Conv2d
        and conv.bias is not None
        and (conv.stride, conv.dilation, conv.groups, conv.padding_mode) == ((1, 1), (1, 1), 1, "zeros")
        and conv.kernel_size == conv.kernel_size[:1] * 2
        and isinstance(conv.padding, tuple)
        and conv.padding == conv.padding[:1] * 2
        and type(pooling) is nn.MaxPool2d
        and (pooling.kernel_size, pooling.stride, pooling.padding, pooling.dilation) == (2, 2, 0, 1)
        and not (pooling.ceil_mode or pooling.return_indices)
        and dense.untouched(conv)
        and dense.untouched(pooling)
        and dense.slope_of(activation) is not None
    )


@dataclass(frozen=True, eq=False)
class Form:
    """What a fused convolution is, beside its weights."""

    kernel: int
    padding: int
    slope: float  # of the activation, below zero
    mean: Tensor | None  # (C,) of raw samples, which are normalised on the way; None: they are not raw
    std: Tensor | None
    dtype: torch.dtype  # of the weights


class FusedConv(nn.Conv2d):
    def __init__(self, conv: nn.Conv2d, activation: nn.Module, raw: tuple[Tensor, Tensor] | None) -> None:
        kernel, padding = conv.kernel_size[0], int(conv.padding[0])
        super().__init__(conv.in_channels, conv.out_channels, kernel, padding=padding)
        mean, std = raw or (None, None)
        if mean is not None and std is not None and not mean.numel():
            mean, std = mean.new_zeros(conv.in_channels), std.new_ones(conv.in_channels)
        self.form = Form(kernel, padding, dense.slope_of(activation) or 0.0, mean, std, conv.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, O, H', W')."""
        assert self.bias is not None
        out: Tensor = call(ConvPool, x[None], self.weight[None], self.bias[None], self.form)[0]
        return out.squeeze(0).movedim(3, 1)  # not out[0]: its gradient would be copied into zeros


class ConvPool(Stacked):
    """Images (c, B, C, H, W), weights (c, O, C, k, k), bias (c, O) -> (c, B, H', W', O)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, form: Form) -> tuple[Tensor, ...]:
        """With what the gradient needs: which of the four won, the windows, the matrix of weights."""
        from coterie.core.kernels import conv

        stack, batch, channels, height, width = x.shape
        shape = conv.Geometry(height, width, channels, form.kernel, form.padding)
        dtype = compute_type(weight)
        windows = conv.windows(x.flatten(0, 1), shape, dtype, form.mean, form.std).view(stack, -1, shape.length)
        matrix = conv.four_places(weight, bias, shape, dtype).flatten(2)  # (c, L, 4 O)
        four = torch.bmm(windows, matrix).view(-1, 4, weight.shape[1])
        out, winner = conv.pool(four, form.slope)
        pooled = (stack, batch, shape.rows, shape.columns, weight.shape[1])
        return out.view(pooled), winner.view(pooled), windows, matrix

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, _, ctx.form = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)
        ctx.image = x.shape[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, Tensor, Tensor, None]:
        made = call(ConvPoolGradient, gradient, *ctx.saved_tensors, ctx.form, ctx.image, ctx.needs_input_grad[0])
        weight, bias, *x = made
        return (x[0] if x else None), weight, bias, None

    @classmethod
    def vmap(cls, info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor, form: Form) -> Any:
        if dims[1] is None and dims[2] is None and len(weight) == 1:  # one network for all: their images are one batch
            images = x.movedim(dims[0], 0).flatten(0, 2)[None]
            *made, matrix = call(ConvPool, images, weight, bias, form)
            return (*(unfold_stack(t[0], info.batch_size)[:, None] for t in made), matrix), (0, 0, 0, None)
        return super().vmap(info, dims, x, weight, bias, form)


class ConvPoolGradient(Last):
    @staticmethod
    def forward(
        gradient: Tensor, out: Tensor, winner: Tensor, windows: Tensor, matrix: Tensor,
        form: Form, image: torch.Size, wanted: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Of weight and bias, and of the images (c, B, C, H, W) where wanted."""
        from coterie.core.kernels import conv

        stack, channels = len(gradient), gradient.shape[-1]
        shape = conv.Geometry(image[1], image[2], image[0], form.kernel, form.padding)
        gradient, out, winner = (t.contiguous() for t in (gradient, out, winner))
        four = conv.unpool(gradient, out, winner, form.slope).view(stack, -1, 4 * channels)
        weights = conv.from_four_places(transposed_product(windows, four), shape, form.dtype)
        if not wanted:
            return weights
        x = conv.fold(torch.bmm(four, matrix.mT).view(-1, shape.length), shape, gradient.shape[:2].numel())
        return (*weights, unfold_stack(x, stack).movedim(4, 2))


class Drawn(Last):
    """Images (c, n, C, H, W) of an index (c, B), cropped and flipped by random bits (c, B), in one pass."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, bits: Tensor, crop: int, flip: bool) -> Tensor:
        from coterie.core.kernels import steps

        return steps.draw(x, index, bits, crop, flip)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index], for images (n, C, H, W) and an index (c, B)."""
    if not stacks.usable(x.device) or x.ndim != 4:
        return x[index]
    images: Tensor = call(Drawn, x.expand(len(index), *x.shape), index, index, 0, False)
    return images


class Descent(Last):
    """A step of `count` weights of any shape: given them, their slopes and, if there are any, velocities.

    rate (): factor on lr. active (): False where nothing is to change; None: it is. Velocities after it only if there
    is momentum.
    """

    @staticmethod
    def forward(
        rate: Tensor, active: Tensor | None, lr: float, decay: float, momentum: float, count: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        from coterie.core.kernels import steps

        flat = [t.contiguous() for t in given]
        tensors = flat[:count], flat[count : 2 * count], flat[2 * count :]
        rows = None if active is None else active.contiguous()
        moved, speeds = steps.descend(*tensors, rate, rows, lr, decay, momentum)
        return (*moved, *speeds)

    @classmethod
    def vmap(cls, info: Any, dims: tuple[Any, ...], rate: Tensor, active: Tensor | None, *given: Any) -> Any:
        if dims[0] is not None:
            raise CoterieError("the factor on the learning rate must be the same for all clients of a round")
        each = None if active is None else in_front(active, dims[1], info.batch_size)
        rows = (in_front(t, dim, info.batch_size) for t, dim in zip(given[4:], dims[6:], strict=True))
        made = call(Descent, rate, each, *given[:4], *rows)
        return made, (0,) * len(made)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """a^T b of a (c, M, L) and b (c, M, N), in so many parts (c, parts, L, N), to be summed, that a GPU is busy."""
    stack, rows, length = a.shape
    tiles = stack * -(-length // 128) * -(-b.shape[2] // 128)
    parts = next(p for p in range(max(FULL // tiles, 1), 0, -1) if rows % p == 0)
    a, b = (t.view(stack * parts, rows // parts, -1) for t in (a, b))
    return unfold_stack(torch.bmm(a.mT, b), stack)
