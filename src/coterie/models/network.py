"""The common form of all networks: an encoder (x -> z) and a head (z -> logits)."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, nn

from coterie.core.errors import CoterieError

Shape = tuple[int, ...]  # of one sample


class Network(nn.Module):
    """logits = head(encoder(x))."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder  # (B, ...) -> (B, d)
        self.head = head  # (B, d) -> (B, K)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x))
        return logits


class Conv(NamedTuple):
    """A convolution with stride 1, followed by 2 x 2 pooling that halves the image."""

    channels: int
    kernel: int
    padding: int = 0

    def side_after(self, side: int) -> int:
        return (side + 2 * self.padding - self.kernel + 1) // 2

    def side_before(self, side: int) -> int:
        """The smallest input side for this output side."""
        return 2 * side + self.kernel - 1 - 2 * self.padding


def check_image(name: str, shape: Shape, smallest: int = 1) -> None:
    """Raise an error unless samples are C x H x W images of at least the smallest size."""
    if len(shape) == 3 and shape[0] >= 1 and min(shape[1:]) >= smallest:
        return
    raise CoterieError(
        f"model '{name}' takes images C x H x W of at least {smallest} x {smallest} pixels, "
        f"not samples of shape {shape}"
    )


def smallest_side(convs: tuple[Conv, ...]) -> int:
    side = 1
    for conv in reversed(convs):
        side = conv.side_before(side)
    return max(side, 1)


def flat_size(shape: Shape, convs: tuple[Conv, ...]) -> int:
    """Number of features of a C x H x W image after the convolutions."""
    sides = shape[1:]
    for conv in convs:
        sides = tuple(conv.side_after(side) for side in sides)
    return convs[-1].channels * math.prod(sides)


def conv_layers(channels: int, convs: tuple[Conv, ...], activation: nn.Module, norm: str = "none") -> list[nn.Module]:
    """Convolution, normalization, pooling, activation, for each entry of convs.

    The papers apply the activation before pooling. Both orders give the same values and gradients, since the maximum
    commutes with increasing functions; this one applies the activation to a quarter of the values.
    """
    layers: list[nn.Module] = []
    for conv in convs:
        layers.append(nn.Conv2d(channels, conv.channels, conv.kernel, padding=conv.padding))
        if norm != "none":
            layers.append(batch_norm(conv.channels, statistics=norm == "stats"))
        layers += [nn.MaxPool2d(2), activation]
        channels = conv.channels
    return layers


def batch_norm(channels: int, statistics: bool = True) -> nn.BatchNorm2d:
    """BatchNorm; without running statistics it uses those of the batch, also in evaluation."""
    norm = nn.BatchNorm2d(channels, track_running_stats=statistics)
    norm.num_batches_tracked = None  # an int64 counter that only momentum=None needs
    return norm


def group_norm(channels: int, groups: int = 8) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels)
