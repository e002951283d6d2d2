"""ResNet-18 for small images: a 3 x 3 stem, no pooling before the blocks (He et al. 2016, as used on CIFAR)."""

from __future__ import annotations

from torch import Tensor, nn

from coterie.models.network import Network, Shape, batch_norm, check_image

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride of the first of two blocks


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(_conv(before, after, 3, stride), batch_norm(after), nn.ReLU())
        self.second = nn.Sequential(_conv(after, after, 3, 1), batch_norm(after))
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(_conv(before, after, 1, stride), batch_norm(after))

    def forward(self, x: Tensor) -> Tensor:
        path: Tensor = self.second(self.first(x))
        way: Tensor = self.shortcut(x)
        return (path + way).relu()


def resnet18(shape: Shape, classes: int) -> Network:
    """d = 512."""
    check_image("resnet18", shape)
    layers: list[nn.Module] = [_conv(shape[0], 64, 3, 1), batch_norm(64), nn.ReLU()]
    channels = 64
    for after, stride in STAGES:
        layers += [Block(channels, after, stride), Block(after, after, 1)]
        channels = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), nn.Linear(channels, classes))


def _conv(before: int, after: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
