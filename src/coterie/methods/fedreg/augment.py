"""Augmentation of uint8 images (B, C, H, W), with random numbers per image that are derived from a key.

Pixels change as in Pillow and torchvision: nearest neighbor, black outside the image, fractions truncated. All
operations work on integers 0..255 in float64, where looped and stacked clients agree exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import random
from coterie.core.data import Transform
from coterie.core.ops import augment

AUGMENTATIONS = ("simple", "auto", "none")
CROP, ROTATION, JITTER, HUE, SHIFT, SCALE = 4, 15.0, 0.2, 0.1, 0.1, 0.1  # pixels, degrees, shares

# AutoAugment for CIFAR-10 (Cubuk et al., CVPR 2019, Table 7): each image gets one row; operation, probability, level.
POLICY = (
    (("invert", 0.1, 0), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("colour", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("colour", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("colour", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 0)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
    (("colour", 0.9, 9), ("equalize", 0.6, 0)),
    (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("colour", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 0), ("invert", 0.1, 0)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 0)),
)


def simple(x: Tensor, key: Tensor, flip: bool = True) -> Tensor:
    """Flip, crop, rotation, color jitter (of color images), and a shift with a change of scale.

    For images that are not uint8 only the geometry changes, since their value range is unknown.
    """
    bits = random.bits(random.derive(key, 0), torch.arange(len(x), device=x.device))
    turn, *colours, right, down, scale = (uniform(key, number, len(x)) for number in range(1, 9))
    x = augment(x, bits, Transform(crop=CROP, flip=flip))
    x = resample(x, turned(between(-ROTATION, ROTATION, turn)))
    if x.dtype == torch.uint8 and x.shape[1] == 3:
        x = jitter(x.to(torch.float64), *colours).to(torch.uint8)
    right = (between(-SHIFT, SHIFT, right) * x.shape[3]).round()
    down = (between(-SHIFT, SHIFT, down) * x.shape[2]).round()
    return resample(x, shifted(right, down, between(1 - SCALE, 1 + SCALE, scale)))


def auto(x: Tensor, key: Tensor) -> Tensor:
    """Two operations of AutoAugment's policy for CIFAR-10, with torchvision's strengths; also for gray images."""
    row = random.bits(random.derive(key, 0), torch.arange(len(x), device=x.device)) % len(POLICY)  # (B,)
    pixels = x.to(torch.float64)
    for step in (0, 1):
        draw = uniform(key, 1 + 2 * step, len(x))
        sign = torch.where(uniform(key, 2 + 2 * step, len(x)) < 0.5, torch.ones_like(draw), -1)  # float64
        before = pixels
        for name, (operation, strongest) in OPERATIONS.items():
            rules = [(row == i, *rule[step][1:]) for i, rule in enumerate(POLICY) if rule[step][0] == name]
            if rules:
                chance = torch.stack([here * p for here, p, _ in rules]).sum(0)  # (B,) 0 for other operations
                level = torch.stack([here * level for here, _, level in rules]).sum(0)
                changed = operation(before, sign * level * strongest / 9)
                pixels = torch.where((draw < chance)[:, None, None, None], changed, pixels)
    return pixels.to(x.dtype)


# Draws.


def uniform(key: Tensor, number: int, n: int) -> Tensor:
    """(n,) in [0, 1), in float64."""
    bits = random.bits(random.derive(key, number), torch.arange(n, device=key.device))
    return (bits >> 10).to(torch.float64) * 2.0**-53


def between(low: float, high: float, draws: Tensor) -> Tensor:
    return low + (high - low) * draws


# Geometry. A map (B, 2, 3) gives the source position of every pixel of the new image, relative to the center.


def resample(x: Tensor, where: Tensor) -> Tensor:
    """(B, C, H, W) with the nearest source pixel; 0 outside."""
    height, width = x.shape[2:]
    right = torch.arange(width, dtype=where.dtype, device=x.device) + (0.5 - width / 2)  # centers of pixels
    down = torch.arange(height, dtype=where.dtype, device=x.device) + (0.5 - height / 2)
    a, b, c, d, e, f = where.flatten(1)[:, :, None, None].unbind(1)  # (B, 1, 1) each
    column = (a * right + b * down[:, None] + c + width / 2).floor().long()  # (B, H, W)
    row = (d * right + e * down[:, None] + f + height / 2).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    image = torch.arange(len(x), device=x.device)[:, None, None]
    found = x.movedim(1, 3)[image, row.clamp(0, height - 1), column.clamp(0, width - 1)]  # (B, H, W, C)
    return torch.where(inside[..., None], found, torch.zeros_like(found)).movedim(3, 1)


def linear(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    return torch.stack([a, b, c, d, e, f], 1).view(-1, 2, 3)


def turned(degrees: Tensor) -> Tensor:
    """Rotate counterclockwise."""
    cos, sin, zero = degrees.deg2rad().cos(), degrees.deg2rad().sin(), torch.zeros_like(degrees)
    return linear(cos, -sin, zero, sin, cos, zero)


def sheared(slope: Tensor, width: int) -> Tensor:
    """Shear vertically, in proportion to the column."""
    one, zero = torch.ones_like(slope), torch.zeros_like(slope)
    return linear(one, zero, zero, slope, one, slope * width / 2)


def shifted(right: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    zero = torch.zeros_like(scale)
    return linear(1 / scale, zero, -right / scale, zero, 1 / scale, -down / scale)


# Colors. `factor` (B,): 1 leaves the image unchanged, 0 removes the property, above 1 exaggerates it.


def whole(x: Tensor) -> Tensor:
    """Truncate to integers 0..255, with a tolerance for rounding errors, so that all machines agree."""
    return (x + 1e-6).floor().clamp(0, 255)


def blend(x: Tensor, plain: Tensor, factor: Tensor) -> Tensor:
    return whole(plain + factor[:, None, None, None] * (x - plain))


def grey(x: Tensor) -> Tensor:
    """(B, 1, H, W)"""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()[:, None]


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    return blend(x, torch.zeros_like(x), factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    return blend(x, (grey(x).mean((1, 2, 3), keepdim=True) + 0.5).floor(), factor)


def colour(x: Tensor, factor: Tensor) -> Tensor:
    return blend(x, grey(x), factor)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    smooth = (9 * F.avg_pool2d(x, 3, 1) + 4 * x[:, :, 1:-1, 1:-1]) / 13  # weight 5 for the pixel, 1 for its neighbors
    inner = F.pad((smooth + 0.5).floor(), (1, 1, 1, 1))
    border = F.pad(torch.zeros_like(smooth), (1, 1, 1, 1), value=1.0) > 0  # is not changed
    return blend(x, torch.where(border, x, inner), factor)


def jitter(x: Tensor, light: Tensor, range: Tensor, tone: Tensor, turn: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue, from draws (B,)."""
    for change, draws in ((brightness, light), (contrast, range), (colour, tone)):
        x = change(x, between(1 - JITTER, 1 + JITTER, draws))
    return hue(x, between(-HUE, HUE, turn))


def hue(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue by a share of the color circle."""
    high, low = x.amax(1), x.amin(1)  # (B, H, W)
    red, green, blue = x.unbind(1)
    span = (high - low).clamp_min(1e-9)
    sector = torch.where(
        high == red,
        (green - blue) / span,
        torch.where(high == green, 2 + (blue - red) / span, 4 + (red - green) / span),
    )
    sector = sector + 6 * turn[:, None, None]
    parts = [(sector + start) % 6 for start in (5, 3, 1)]
    new = torch.stack([high - (high - low) * torch.minimum(p, 4 - p).clamp(0, 1) for p in parts], 1)
    return (new + 0.5).floor()


def table(x: Tensor, values: Tensor) -> Tensor:
    """Replace each pixel by the entry of its channel's lookup table (B, C, 256)."""
    return values.gather(2, x.long().flatten(2)).view(x.shape)


def autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    low, high = x.amin((2, 3)), x.amax((2, 3))  # (B, C)
    scale = 255 / (high - low).clamp_min(1e-9)
    ramp = torch.arange(256, device=x.device).to(x.dtype)
    stretched = whole((ramp - low[..., None]) * scale[..., None])
    return table(x, torch.where((high > low)[..., None], stretched, ramp))


def equalize(x: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    flat = x.long().flatten(2)
    counts = torch.zeros(*x.shape[:2], 256, dtype=torch.int64, device=x.device).scatter_add(
        2, flat, torch.ones_like(flat)
    )
    last = flat.amax(2)  # the brightest value is excluded from the step
    step = (counts.sum(2) - counts.gather(2, last[..., None])[..., 0]) // 255  # (B, C)
    below = counts.cumsum(2) - counts
    even = (below + (step // 2)[..., None]) // step.clamp_min(1)[..., None]
    same = torch.arange(256, device=x.device)
    return table(x, torch.where((step > 0)[..., None], even.clamp(0, 255), same).to(x.dtype))


def posterize(x: Tensor, less: Tensor) -> Tensor:
    """Clear the lowest bits."""
    unit = 2.0 ** less.abs().round()[:, None, None, None]
    return (x / unit).floor() * unit


def solarize(x: Tensor, less: Tensor) -> Tensor:
    """Invert the pixels above 255 - less."""
    return torch.where(x >= (255 - less.abs())[:, None, None, None], 255 - x, x)


def moved(x: Tensor, right: float, down: float, share: Tensor) -> Tensor:
    """Translate by whole pixels, a share of the width or the height."""
    pixels = (share * (right * x.shape[3] + down * x.shape[2])).trunc()
    return resample(x, shifted(right * pixels, down * pixels, torch.ones_like(pixels)))


Operation = Callable[[Tensor, Tensor], Tensor]  # pixels (B, C, H, W), strength (B,) with a sign

OPERATIONS: dict[str, tuple[Operation, float]] = {  # and its strength at level 9
    "rotate": (lambda x, s: resample(x, turned(s)), 30.0),
    "shear_y": (lambda x, s: resample(x, sheared(s, x.shape[3])), 0.3),
    "translate_x": (lambda x, s: moved(x, 1, 0, s), 150 / 331),
    "translate_y": (lambda x, s: moved(x, 0, 1, s), 150 / 331),
    "brightness": (lambda x, s: brightness(x, 1 + s), 0.9),
    "contrast": (lambda x, s: contrast(x, 1 + s), 0.9),
    "colour": (lambda x, s: colour(x, 1 + s), 0.9),
    "sharpness": (lambda x, s: sharpness(x, 1 + s), 0.9),
    "posterize": (posterize, 4.0),
    "solarize": (solarize, 255.0),
    "autocontrast": (lambda x, s: autocontrast(x), 0.0),
    "equalize": (lambda x, s: equalize(x), 0.0),
    "invert": (lambda x, s: 255 - x, 0.0),
}
