"""Write images as PNG with the standard library only."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor


def png(image: Tensor) -> bytes:
    """A PNG of one uint8 image (C, H, W), grey or RGB."""
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
