"""Image files of one size: the shorter side is resized, then the center is cropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError

MOST_PIXELS = 2**26  # per image
BILINEAR = 2  # Pillow's Resampling.BILINEAR; it averages over the source pixels when it shrinks


def fitted(image: Any, height: int, width: int) -> Any:
    """Resize a Pillow image so that it covers height x width, and crop the center."""
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    image = image.resize(size, BILINEAR)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def read_rgb(path: Path, side: int) -> NDArray[np.uint8]:
    """(3, side, side) the image in a file."""
    try:
        from PIL import Image
    except ImportError:
        raise CoterieError("reading images needs Pillow: pip install 'coterie[images]'") from None
    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels exceed the limit")
            return np.asarray(fitted(image.convert("RGB"), side, side)).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CoterieError(f"{path}: cannot be read as an image ({error})") from error
