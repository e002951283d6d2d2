"""A small MobileNetV2 (Sandler et al. 2018) for 32 x 32 images, with GroupNorm instead of BatchNorm."""

from __future__ import annotations

from torch import Tensor, nn

from coterie.models.network import Network, Shape, check_image, group_norm

STEM, LAST = 32, 384  # channels of the first and the last convolution
# expansion, channels, number of blocks, stride of the first
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 2, 2), (6, 64, 2, 2), (6, 96, 2, 1))


class InvertedResidual(nn.Module):
    """Expand (1 x 1), filter each channel (3 x 3), project (1 x 1); a shortcut where shapes agree."""

    def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = before * expansion
        expand = _conv(before, hidden, 1) if expansion > 1 else []
        depthwise = _conv(hidden, hidden, 3, stride, groups=hidden)
        project = _conv(hidden, after, 1)[:-1]  # linear: no activation
        self.layers = nn.Sequential(*expand, *depthwise, *project)
        self.shortcut = before == after and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.shortcut else out


def mobilenet(shape: Shape, classes: int) -> Network:
    """MobileNetV2 with nine inverted residual blocks; d = 384."""
    check_image("mobilenet", shape)
    layers, channels = _conv(shape[0], STEM, 3), STEM
    for expansion, after, blocks, stride in STAGES:
        for block in range(blocks):
            layers.append(InvertedResidual(channels, after, 1 if block else stride, expansion))
            channels = after
    layers += [*_conv(channels, LAST, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), nn.Linear(LAST, classes))


def _conv(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, GroupNorm, ReLU6."""
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, group_norm(after), nn.ReLU6()]
