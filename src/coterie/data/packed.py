"""The format of the included Fashion-MNIST: compact, lossless, read with the standard library and numpy.

Half of all pixels are background. The format has one bit per pixel (zero or not), then the difference of each nonzero
pixel to the pixel above, in one xz stream. Bytes per image, measured on 2,000 images: 371 for xz alone, 399 for bz2
alone, 383 for differences without the bits, 344 for this format, 339 with the predictor of JPEG-LS.
"""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError

Bytes = NDArray[np.uint8]
HEADER = struct.Struct(">III")  # N, H, W


def pack(x: Bytes, y: Bytes) -> bytes:
    """Images (N, H, W) and labels (N,) as bytes."""
    inked = x > 0
    rise = np.diff(x, axis=1, prepend=np.uint8(0))  # modulo 256
    content = HEADER.pack(*x.shape) + y.tobytes() + np.packbits(inked).tobytes() + rise[inked].tobytes()
    best = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}
    return lzma.compress(content, filters=[best])


def unpack(path: Path) -> tuple[Bytes, Bytes]:
    """Read images (N, H, W) and labels (N,) that `pack` encoded."""
    try:
        content = lzma.decompress(path.read_bytes())
        shape = HEADER.unpack_from(content)
        y, bits, rises = np.split(
            np.frombuffer(content, np.uint8, offset=HEADER.size), np.cumsum([shape[0], -(-np.prod(shape) // 8)])
        )
        inked = np.unpackbits(bits, count=int(np.prod(shape))).astype(bool).reshape(shape)
        x = np.zeros(shape, np.uint8)
        x[inked] = rises
    except (OSError, lzma.LZMAError, EOFError, ValueError, struct.error) as error:
        raise CoterieError(f"{path}: damaged; install Coterie again ({error})") from error
    for row in range(1, shape[1]):
        x[:, row] = np.where(inked[:, row], x[:, row - 1] + x[:, row], 0)
    return x, y
