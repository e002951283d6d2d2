"""Rewrite a model so that its layers run as fused operations. Weights keep their names and shapes.

Dense layers take the activation that follows them. Where a network begins with a convolution, 2 x 2 pooling and an
activation, every such triple becomes one layer.
"""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import TypeGuard, cast

from torch import Tensor, nn

from coterie.core.model import Model
from coterie.gpu.convolution import conv_pool
from coterie.gpu.dense import IDENTITY, compute_dtype, dense


class FusedModel(Model):
    """A model whose first layer normalizes raw samples."""

    def prepare(self, x: Tensor) -> Tensor:
        return x


def fuse(model: Model) -> Model:
    """The same model with fused layers."""
    encoder, head = (fuse_dense(copy.deepcopy(part)) for part in (model.encoder, model.head))
    raw_images = not (model.preprocess.axis or model.preprocess.inputs)
    if not is_chain(encoder) or not is_fusible_conv(encoder, 0) or not raw_images:
        return replace(model, encoder=encoder, head=head)
    for at in range(len(encoder)):
        if is_fusible_conv(encoder, at):
            raw = (model.preprocess.mean, model.preprocess.std) if at == 0 else None
            encoder[at] = FusedConv(cast(nn.Conv2d, encoder[at]), encoder[at + 2], raw)
            encoder[at + 1], encoder[at + 2] = nn.Identity(), nn.Identity()
    rest = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in ("encoder", "head")}
    return FusedModel(encoder, head, **rest)


def fuse_dense(part: nn.Module) -> nn.Module:
    """Fuse the dense layers of a chain, or this one, with the activations behind them."""
    if is_fusible_dense(part):
        return FusedLinear(part, IDENTITY)
    if is_chain(part):
        for at, layer in enumerate(part):
            behind = part[at + 1] if at + 1 < len(part) else None
            if is_fusible_dense(layer) and (slope := slope_of(behind)) is not None:
                part[at], part[at + 1] = FusedLinear(layer, slope), nn.Identity()
            else:
                part[at] = fuse_dense(layer)
    return part


def is_chain(part: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward


def is_fusible_dense(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and layer.bias is not None and has_no_hooks(layer)


def is_fusible_conv(layers: nn.Sequential, at: int) -> bool:
    """Whether a convolution, 2 x 2 pooling and an activation begin at this index."""
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
        and has_no_hooks(conv)
        and has_no_hooks(pooling)
        and slope_of(activation) is not None
    )


def has_no_hooks(layer: nn.Module) -> bool:
    """Whether the module has no hooks: a fused layer would not call them."""
    return not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def slope_of(activation: nn.Module | None) -> float | None:
    """The slope of an activation below zero; None if it cannot be fused."""
    if activation is None or not has_no_hooks(activation):
        return None
    if type(activation) is nn.ReLU:
        return 0.0
    if (
        type(activation) is nn.LeakyReLU and activation.negative_slope >= 0
    ):  # its gradient is read off the output's sign
        return activation.negative_slope
    return None


class FusedLinear(nn.Linear):
    """A dense layer and its activation."""

    def __init__(self, layer: nn.Linear, slope: float) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        dtype = compute_dtype(self.weight)
        rows = x.reshape(-1, self.in_features).to(dtype)
        out: Tensor = dense(rows[None], self.weight[None].to(dtype), self.bias[None], self.slope)
        return out.squeeze(0).view(*x.shape[:-1], self.out_features)


class FusedConv(nn.Conv2d):
    """A convolution, 2 x 2 maximum pooling and activation. raw: mean and std of raw samples, for a first layer."""

    def __init__(self, conv: nn.Conv2d, activation: nn.Module, raw: tuple[Tensor, Tensor] | None) -> None:
        kernel, padding = conv.kernel_size[0], int(conv.padding[0])
        super().__init__(conv.in_channels, conv.out_channels, kernel, padding=padding, device="meta")
        self.weight, self.bias = conv.weight, conv.bias  # used where they are frozen
        mean, std = raw or (None, None)
        if mean is not None and std is not None and not mean.numel():
            mean, std = mean.new_zeros(conv.in_channels), std.new_ones(conv.in_channels)
        self.form = mean, std, padding, slope_of(activation) or 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, O, h, w)."""
        assert self.bias is not None
        out, *_ = conv_pool(x[None], self.weight[None], self.bias[None], *self.form, compute_dtype(self.weight))
        pooled: Tensor = out.squeeze(0).movedim(3, 1)  # not out[0]: its gradient would be copied into zeros
        return pooled
