"""Long messages in pieces, and the pieces put together again: never more of them than a message may have."""

from __future__ import annotations

import hashlib
import struct

from coterie.network.wire import Refused

SIZE = 2**18  # bytes of a piece
HEAD = struct.Struct("<32sII")  # SHA-256 of the message, number of the piece, how many there are


def cut(message: bytes) -> list[bytes]:
    digest = hashlib.sha256(message).digest()
    count = max(-(-len(message) // SIZE), 1)
    return [HEAD.pack(digest, i, count) + message[i * SIZE : (i + 1) * SIZE] for i in range(count)]


class Pieces:
    """Those of one sender's message. Pieces of another message begin it anew."""

    def __init__(self, most: int) -> None:
        self.most = most  # bytes of a message
        self.digest = b""
        self.found: dict[int, bytes] = {}

    def add(self, piece: bytes) -> bytes | None:
        """The message, when this was its last piece."""
        if len(piece) < HEAD.size:
            raise Refused("it is no piece of a message")
        digest, number, count = HEAD.unpack_from(piece)
        content = piece[HEAD.size :]
        if not 0 < count <= -(-self.most // SIZE) or number >= count or len(content) > SIZE:
            raise Refused(f"it is longer than the {self.most} bytes that it may have")
        if number < count - 1 and len(content) != SIZE:
            raise Refused("a piece of it is not whole")
        if digest != self.digest:
            self.digest, self.found = digest, {}
        self.found[number] = content
        if len(self.found) < count:
            return None
        message = b"".join(self.found.get(i, b"") for i in range(count))
        self.digest, self.found = b"", {}
        if hashlib.sha256(message).digest() != digest:
            raise Refused("its checksum is wrong")
        return message
