"""Split long messages into chunks, and join the chunks again, within a size limit."""

from __future__ import annotations

import hashlib
import struct

from coterie.deploy.wire import Refused

SIZE = 2**18  # bytes of a chunk
HEAD = struct.Struct("<32sII")  # SHA-256 of the message, index of the chunk, number of chunks


def to_chunks(message: bytes) -> list[bytes]:
    digest = hashlib.sha256(message).digest()
    count = max(-(-len(message) // SIZE), 1)
    return [HEAD.pack(digest, i, count) + message[i * SIZE : (i + 1) * SIZE] for i in range(count)]


class ChunkBuffer:
    """The chunks of one message. A chunk of another message discards them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # of a message
        self.digest = b""
        self.found: dict[int, bytes] = {}

    def add(self, chunk: bytes) -> bytes | None:
        """The message, once this was its last missing chunk."""
        if len(chunk) < HEAD.size:
            raise Refused("not a chunk of a message")
        digest, number, count = HEAD.unpack_from(chunk)
        content = chunk[HEAD.size :]
        if not 0 < count <= -(-self.max_bytes // SIZE) or number >= count or len(content) > SIZE:
            raise Refused(f"longer than the limit of {self.max_bytes} bytes")
        if number < count - 1 and len(content) != SIZE:
            raise Refused("a chunk is incomplete")
        if digest != self.digest:
            self.digest, self.found = digest, {}
        self.found[number] = content
        if len(self.found) < count:
            return None
        message = b"".join(self.found.get(i, b"") for i in range(count))
        self.digest, self.found = b"", {}
        if hashlib.sha256(message).digest() != digest:
            raise Refused("checksum mismatch")
        return message
