"""The included images, decompressed once per process: that takes longer than most trainings of the tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from coterie.data import image_datasets
from coterie.data.packed import Bytes, unpack

unpacked = cache(unpack)


def copied(path: Path) -> tuple[Bytes, Bytes]:
    """Copies: a test may write into what it loads."""
    x, y = unpacked(path)
    return x.copy(), y.copy()


image_datasets.unpack = copied
