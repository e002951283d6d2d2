"""A small U-Net (Ronneberger, Fischer, Brox 2015) for segmentation, with GroupNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.errors import CoterieError
from coterie.models.network import Network, Shape, check_image, group_norm

LEVELS = 2  # halvings of the image


class UNetEncoder(nn.Module):
    """(B, C, H, W) -> (B, width, H, W): features of every pixel. Images may have any sides."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(LEVELS + 1)]
        self.down = nn.ModuleList(_block(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = []
        for level, block in enumerate(self.down):
            maps.append(block(F.max_pool2d(maps[-1], 2) if level else x))
        z = maps.pop()
        for block in self.up:
            skipped = maps.pop()
            z = block(torch.cat([skipped, F.interpolate(z, skipped.shape[2:])], 1))
        return z


def unet(shape: Shape, classes: int, width: int = 16) -> Network:
    """A U-Net with two halvings, for one class per pixel. width: channels at full size, a multiple of 8."""
    check_image("unet", shape, 2**LEVELS)
    if width < 8 or width % 8:
        raise CoterieError(f"model 'unet': width must be a multiple of 8, got {width}")
    return Network(UNetEncoder(shape[0], width), nn.Conv2d(width, classes, 1))


def _block(before: int, after: int) -> nn.Sequential:
    """Twice: convolution 3 x 3, GroupNorm, ReLU."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), group_norm(after), nn.ReLU()]
    return nn.Sequential(*layers)
