"""Pictures of clients' classes and images, before and after a method changes them."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor

from coterie.core import random
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.data import picture


def class_pictures(data: FederatedData, method: AnyMethod) -> dict[str, str]:
    """File name -> SVG of the clients' classes, before and after the method changes them; empty if it does not."""
    names = data.class_names or tuple(map(str, range(data.classes)))
    before = data.train.class_counts(data.classes)
    after = method.training_classes(before)
    if after is None:
        return {}
    return {
        f"classes-{when}.svg": picture(f"{data.name}, {when} {method.title}", counts.numpy(), names, data.client_names)
        for when, counts in (("before", before), ("after", after))
    }


def augmented_samples(data: FederatedData, method: AnyMethod, count: int = 12, seed: int = 0) -> bytes | None:
    """A PNG with a row of samples, and one for each way in which the method varies them; None if it does not."""
    if data.train.x.ndim != 4:
        raise CoterieError(f"{data.name} has no images to augment")
    drawn = random.shuffle(random.seed_key(seed), len(data.train.y))[:count]
    x, key = data.train.x[drawn], random.derive(random.seed_key(seed), random.REBALANCE)
    varied = method.augmentations(x, key)
    return png(sheet([x, *(images.to(torch.uint8) for images in varied.values())])) if varied else None


def png(image: Tensor) -> bytes:
    """A PNG of one uint8 image (C, H, W), gray or RGB, by the standard library alone."""
    channels, height, width = image.shape
    pixels = image.permute(1, 2, 0).reshape(height, width * channels).cpu()
    rows = torch.cat([pixels.new_zeros(height, 1), pixels], 1)  # each row starts with its filter type: none
    color = {1: 0, 3: 2}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    data = zlib.compress(rows.contiguous().numpy().tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def sheet(rows: list[Tensor], gap: int = 2, scale: int = 3) -> Tensor:
    """Rows of images (n, C, H, W) of equal shape as one image on white."""
    lines = []
    for images in rows:
        n, channels, height, width = images.shape
        framed = images.new_full((n, channels, height + gap, width + gap), 255)
        framed[:, :, :height, :width] = images
        lines.append(framed.permute(1, 2, 0, 3).reshape(channels, height + gap, n * (width + gap)))
    return torch.cat(lines, 1).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
