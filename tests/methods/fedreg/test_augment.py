"""Changes of images against Pillow, pixel by pixel."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from coterie.core import random
from coterie.methods.fedreg import augment

B, SIDE = 6, 24


def pictures(channels: int = 3, n: int = B, height: int = SIDE, width: int = SIDE) -> Tensor:
    """Smooth shapes with some noise, so that neither edges nor all values are missing."""
    draw = torch.Generator().manual_seed(channels)
    coarse = torch.rand(n, channels, 5, 5, generator=draw)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (smooth * 200 + 40 * torch.rand(smooth.shape, generator=draw)).to(torch.uint8)


def pil(image: Tensor) -> Any:
    array = image.to(torch.uint8).numpy()
    return (
        Image.fromarray(array[0])
        if len(array) == 1
        else Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)))
    )


def tensor(image: Any) -> Tensor:
    array = torch.from_numpy(np.array(image).astype(np.float64))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def by_pillow(x: Tensor, change: Callable[[Any, int], Any]) -> Tensor:
    return torch.stack([tensor(change(pil(image), i)) for i, image in enumerate(x)])


STRENGTH = torch.tensor([-0.9, -0.4, -0.1, 0.0, 0.3, 0.9], dtype=torch.float64)  # another one for each image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (augment.brightness, ImageEnhance.Brightness),
        (augment.contrast, ImageEnhance.Contrast),
        (augment.colour, ImageEnhance.Color),
        (augment.sharpness, ImageEnhance.Sharpness),
    ],
    ids=["brightness", "contrast", "colour", "sharpness"],
)
def test_enhancements(channels: int, ours: Any, theirs: Any) -> None:
    x = pictures(channels)
    found = ours(x.double(), 1 + STRENGTH)
    expected = by_pillow(x, lambda image, i: theirs(image).enhance(1 + float(STRENGTH[i])))
    assert (found - expected).abs().max() <= 1  # Pillow reckons in float32 and cuts off
    assert (found == expected).double().mean() > 0.98
    assert not torch.equal(found[0], x[0].double()) or (channels == 1 and ours is augment.colour)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["autocontrast", "equalize", "invert"])
def test_operations_without_strength(channels: int, name: str) -> None:
    x = pictures(channels) // 2 + 30  # not the whole range
    x[0] = 77  # one value only
    x[1, :, 0, 0] = 255  # one outlier
    found = augment.OPERATIONS[name][0](x.double(), STRENGTH)
    expected = by_pillow(x, lambda image, i: getattr(ImageOps, name)(image))
    if name == "autocontrast":  # Pillow cuts 143.99999 to 143
        assert (found - expected).abs().max() <= 1
        assert (found == expected).double().mean() > 0.98
    else:
        assert torch.equal(found, expected)


def test_posterize_and_solarize_at_all_levels() -> None:
    """Bits that stay: 8 - round(level · 4 / 9); limits: 255 - level · 255 / 9."""
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for level in range(10):
        at = torch.tensor([float(level)], dtype=torch.float64)
        posterized = augment.OPERATIONS["posterize"][0](x.double(), at * 4 / 9)
        assert torch.equal(
            posterized, by_pillow(x, lambda image, i, n=level: ImageOps.posterize(image, 8 - round(n * 4 / 9)))
        )
        solarized = augment.OPERATIONS["solarize"][0](x.double(), -at * 255 / 9)
        assert torch.equal(
            solarized, by_pillow(x, lambda image, i, n=level: ImageOps.solarize(image, 255 - n * 255 / 9))
        )


@pytest.mark.parametrize("shape", [(SIDE, SIDE), (20, 29)])
def test_rotation(shape: tuple[int, int]) -> None:
    x = pictures(3, B, *shape)
    degrees = torch.tensor([-30.0, -14.3, 0.0, 5.7, 15.0, 90.0 if shape[0] == shape[1] else 60.0], dtype=torch.float64)
    found = augment.resample(x, augment.turned(degrees))
    expected = by_pillow(x, lambda image, i: image.rotate(float(degrees[i]), Image.Resampling.NEAREST))
    assert (found == expected).double().mean() > 0.99  # Pillow rounds coordinates to 1/65536 of a pixel
    assert torch.equal(found[2], x[2])


def test_shift_scale_and_shear() -> None:
    x = pictures(3, B, 20, 29)
    right = torch.tensor([-3.0, 0.0, 2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    down = torch.tensor([0.0, 2.0, -1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    scale = torch.tensor([1.0, 1.0, 1.0, 0.913, 1.071, 0.957], dtype=torch.float64)

    def placed(image: Any, i: int) -> Any:
        """Old place = (new - centre - shift) / scale + centre."""
        s, (w, h) = float(scale[i]), image.size
        row = [1 / s, 0, w / 2 - (w / 2 + float(right[i])) / s, 0, 1 / s, h / 2 - (h / 2 + float(down[i])) / s]
        return image.transform(image.size, Image.Transform.AFFINE, row, Image.Resampling.NEAREST)

    found = augment.resample(x, augment.shifted(right, down, scale))
    assert (found == by_pillow(x, placed)).double().mean() > 0.99
    assert torch.equal(found[0][:, :, :-3], x[0][:, :, 3:])  # to the left
    assert not found[0][:, :, -3:].any()

    slope = 0.3 * STRENGTH

    def sheared(image: Any, i: int) -> Any:
        row = (1, 0, 0, float(slope[i]), 1, 0)
        return image.transform(image.size, Image.Transform.AFFINE, row, Image.Resampling.NEAREST)

    found = augment.resample(x, augment.sheared(slope, 29))
    assert (found == by_pillow(x, sheared)).double().mean() > 0.99


def test_hue() -> None:
    x = pictures()
    x[0, :, :3] = 128  # grey has no hue
    turn = torch.tensor([0.1, -0.1, 0.05, 0.5, 0.0, -0.3], dtype=torch.float64)
    found = augment.hue(x.double(), turn)
    for i in range(B):
        for row, column in ((0, 0), (5, 7), (13, 2), (23, 23)):
            h, s, v = colorsys.rgb_to_hsv(*(x[i, :, row, column].double() / 255).tolist())
            expected = colorsys.hsv_to_rgb((h + float(turn[i])) % 1, s, v)
            assert found[i, :, row, column].tolist() == pytest.approx([255 * p for p in expected], abs=0.51)
    assert torch.equal(found[4], x[4].double())


KEY = random.seed_key(3)


@pytest.mark.parametrize("channels", [1, 3])
def test_auto_is_the_policy_done_by_pillow(channels: int) -> None:
    """Row, chances and signs are drawn as we do; all that is done to an image is done by Pillow, one after another."""
    n = 150
    x = pictures(channels, n)
    found = augment.auto(x, KEY)
    rows = random.bits(random.derive(KEY, 0), torch.arange(n)) % 25
    draws = [augment.uniform(KEY, number, n).tolist() for number in range(1, 5)]
    assert len(rows.unique()) == 25

    def one(image: Any, i: int) -> Any:
        for step in (0, 1):
            name, chance, level = augment.POLICY[int(rows[i])][step]
            if draws[2 * step][i] < chance:
                image = done(image, name, level / 9 * (1 if draws[2 * step + 1][i] < 0.5 else -1))
        return image

    expected = by_pillow(x, one)
    close = ((found.double() - expected).abs() <= 2).double().mean((1, 2, 3))  # by image
    assert close.min() > 0.97
    assert (found != x).flatten(1).any(1).double().mean() > 0.5
    assert found.dtype == torch.uint8


def done(image: Any, name: str, share: float) -> Any:
    """One operation at a share of its greatest strength, with a sign."""
    affine, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
    enhancers = {"brightness": "Brightness", "contrast": "Contrast", "colour": "Color", "sharpness": "Sharpness"}
    if name in enhancers:
        return getattr(ImageEnhance, enhancers[name])(image).enhance(1 + 0.9 * share)
    match name:
        case "rotate":
            return image.rotate(30 * share, nearest)
        case "shear_y":
            return image.transform(image.size, affine, (1, 0, 0, 0.3 * share, 1, 0), nearest)
        case "translate_x" | "translate_y":
            pixels = math.trunc(150 / 331 * SIDE * share)
            row = (1, 0, -pixels, 0, 1, 0) if name == "translate_x" else (1, 0, 0, 0, 1, -pixels)
            return image.transform(image.size, affine, row, nearest)
        case "posterize":
            return ImageOps.posterize(image, 8 - round(4 * abs(share)))
        case "solarize":
            return ImageOps.solarize(image, 255 - 255 * abs(share))
        case _:
            return getattr(ImageOps, name)(image)


def test_simple_turns_and_shifts_but_stays_near() -> None:
    """A bright square in the middle is still there, never at quite the same place in all images."""
    x = torch.zeros(200, 1, 28, 28, dtype=torch.uint8)
    x[:, :, 9:19, 9:19] = 200
    found = augment.simple(x, KEY).double()
    assert set(found.unique().tolist()) == {0.0, 200.0}  # one channel: no colours, no values between
    down, right = (torch.arange(28.0, dtype=torch.float64), torch.arange(28.0, dtype=torch.float64))
    mass = found.sum((1, 2, 3))
    middle = torch.stack([(found.sum((1, 3)) @ down) / mass, (found.sum((1, 2)) @ right) / mass], 1)
    assert (middle - 13.5).abs().max() < 4 + 2.8 + 1.5  # crop, shift, and both scaled
    assert (middle.mean(0) - 13.5).abs().max() < 0.5
    assert middle.std(0).min() > 1
    assert len(found.unique(dim=0)) > 190
    area = mass / 200 / 100
    assert 0.75 < area.min() < 0.9 < 1.1 < area.max() < 1.3  # scale from 0.9 to 1.1


def test_flip_is_a_switch() -> None:
    x = torch.zeros(200, 1, 28, 28, dtype=torch.uint8)
    x[:, :, 8:20, 9:14] = 200
    x[:, :, 15:20, 9:19] = 200  # an L

    def mirrored(images: Tensor) -> Tensor:
        """Whether the lower half reaches to the left of the upper half rather than to its right."""
        place = torch.arange(28.0)
        middle = [
            (part.sum((1, 2)).float() @ place) / part.sum((1, 2, 3)) for part in (images[:, :, :12], images[:, :, 16:])
        ]
        return middle[1] < middle[0] - 0.5

    assert 0.3 < mirrored(augment.simple(x, KEY)).double().mean() < 0.7
    assert mirrored(augment.simple(x, KEY, flip=False)).double().mean() < 0.1  # a turn can look alike


def test_colours_change_only_in_colour_images_of_bytes() -> None:
    x = pictures(3)
    x[:] = x.flatten(2)[:, :, :1, None]  # one colour each
    varied = augment.simple(x, KEY)
    assert all(len(image.flatten(1).unique(dim=1).T) >= 2 for image in varied)
    assert not torch.equal(varied[:, :, 12, 12], x[:, :, 12, 12])
    as_floats = augment.simple(x.double() / 255, KEY)
    torch.testing.assert_close(as_floats[:, :, 12, 12], x[:, :, 12, 12].double() / 255)
    assert as_floats.dtype == torch.float64


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("change", [augment.simple, augment.auto])
def test_clients_side_by_side_get_the_same(change: Any, channels: int) -> None:
    x = torch.stack([pictures(channels, 20), pictures(channels, 20).flip(0)])
    keys = torch.stack([random.derive(KEY, 1), random.derive(KEY, 2)])
    together = torch.func.vmap(change)(x, keys)
    for i in range(2):
        assert torch.equal(together[i], change(x[i], keys[i]))
    assert not torch.equal(together[0], together[1].flip(0))
