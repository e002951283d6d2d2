"""ResNet-18 for small images: a 3 x 3 stem, no pooling before the blocks (He et al. 2016, as used on CIFAR)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from coterie.core.errors import CoterieError
from coterie.models.network import Network, Shape, batch_norm, check_image, group_norm

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride of the first of two blocks
Norm = Callable[[int], nn.Module]  # number of channels -> normalization


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Sequential(_conv(before, after, 3, stride), norm(after), nn.ReLU())
        self.second = nn.Sequential(_conv(after, after, 3, 1), norm(after))
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(_conv(before, after, 1, stride), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.second(self.first(x))
        shortcut: Tensor = self.shortcut(x)
        return (residual + shortcut).relu()


def resnet18(shape: Shape, classes: int) -> Network:
    """ResNet-18; d = 512."""
    check_image("resnet18", shape)
    return _resnet18(shape, classes, batch_norm)


def resnet18_gn(shape: Shape, classes: int, groups: int = 2) -> Network:
    """ResNet-18 with GroupNorm instead of BatchNorm; d = 512. Two groups, as in Reddi et al. 2021."""
    check_image("resnet18-gn", shape)
    if not isinstance(groups, int) or groups < 1 or STAGES[0][0] % groups:
        raise CoterieError(f"groups of model 'resnet18-gn' must divide {STAGES[0][0]}, got {groups!r}")
    return _resnet18(shape, classes, partial(group_norm, groups=groups))


def _resnet18(shape: Shape, classes: int, norm: Norm) -> Network:
    layers: list[nn.Module] = [_conv(shape[0], 64, 3, 1), norm(64), nn.ReLU()]
    channels = 64
    for after, stride in STAGES:
        layers += [Block(channels, after, stride, norm), Block(after, after, 1, norm)]
        channels = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), nn.Linear(channels, classes))


def _conv(before: int, after: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
