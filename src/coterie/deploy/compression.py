"""Lossless compression of messages with zstd. Decompression never exceeds a size limit."""

from __future__ import annotations

from typing import Any

from coterie.core.errors import CoterieError
from coterie.deploy.wire import Refused

LEVEL = 3
WINDOW = 2**27  # bytes of memory that a sender can make the decompressor allocate, in addition to the message


def compress(message: bytes) -> bytes:
    return bytes(library().ZstdCompressor(level=LEVEL).compress(message))


def decompress(message: bytes, max_bytes: int) -> bytes:
    """Checks the declared size first, since the library allocates that much."""
    zstd = library()
    try:
        frame = zstd.get_frame_parameters(message)
        if not 0 <= frame.content_size <= max_bytes or frame.window_size > max(WINDOW, max_bytes):
            raise Refused(f"declares more than the limit of {max_bytes} bytes")
        plain = bytes(zstd.ZstdDecompressor().decompress(message, max_output_size=max_bytes, allow_extra_data=False))
    except zstd.ZstdError:
        raise Refused("not valid zstd data") from None
    if len(plain) > max_bytes:
        raise Refused(f"longer than the limit of {max_bytes} bytes")
    return plain


def library() -> Any:
    try:
        import zstandard
    except ImportError:
        raise CoterieError("--compress zstd needs the package zstandard: pip install 'coterie[compress]'") from None
    return zstandard
