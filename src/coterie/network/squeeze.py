"""Messages made smaller without loss. What comes out is never longer than it may be, whatever is sent."""

from __future__ import annotations

from typing import Any

from coterie.core.errors import CoterieError
from coterie.network.wire import Refused

LEVEL = 3
WINDOW = 2**27  # bytes of memory that a sender can make us take, beside the message


def squeeze(message: bytes) -> bytes:
    return bytes(library().ZstdCompressor(level=LEVEL).compress(message))


def expand(message: bytes, most: int) -> bytes:
    """most: bytes of the message. Its own word on its length is asked first: the library takes memory by it."""
    zstd = library()
    try:
        told = zstd.get_frame_parameters(message)
        if not 0 <= told.content_size <= most or told.window_size > max(WINDOW, most):
            raise Refused(f"it says that it is longer than the {most} bytes that it may have")
        plain = bytes(zstd.ZstdDecompressor().decompress(message, max_output_size=most, allow_extra_data=False))
    except zstd.ZstdError:
        raise Refused("it cannot be expanded") from None
    if len(plain) > most:
        raise Refused(f"it is longer than the {most} bytes that it may have")
    return plain


def library() -> Any:
    try:
        import zstandard
    except ImportError:
        raise CoterieError("zstd needs a library: pip install 'coterie[compress]'") from None
    return zstandard
