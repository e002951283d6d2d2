"""Bounded buffers for incoming messages. One thread adds, another takes."""

from __future__ import annotations

import threading
from collections import deque

from coterie.deploy.chunks import HEAD, ChunkBuffer
from coterie.deploy.wire import Refused

MAX_PARTIAL = 4  # incomplete messages of one sender
MAX_PENDING = 8  # complete messages of one sender that were not taken yet
MAX_WAITING = 2**26  # bytes of announcements that were not taken yet


class Reassembler:
    """Joins the chunks of a few messages at a time, so that stale chunks between new ones do no harm."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # of a message
        self.partial: dict[bytes, ChunkBuffer] = {}  # by digest, least recently used first

    def add(self, chunk: bytes) -> bytes | None:
        """The message, once this was its last missing chunk."""
        digest = chunk[: HEAD.size][:32]
        buffer = self.partial.pop(digest, None) or ChunkBuffer(self.max_bytes)
        message = buffer.add(chunk)
        if message is None:
            self.partial[digest] = buffer
            if len(self.partial) > MAX_PARTIAL:
                self.partial.pop(next(iter(self.partial)))
        return message


class Inbox:
    """Complete messages of each client, in order of arrival."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.partial: dict[int, Reassembler] = {}
        self.complete: dict[int, deque[bytes]] = {}

    def add(self, client: int, chunk: bytes, max_bytes: int) -> bool:
        """Whether one more message can be taken now."""
        with self.lock:
            reassembler = self.partial.get(client)
            if reassembler is None or reassembler.max_bytes != max_bytes:
                reassembler = self.partial[client] = Reassembler(max_bytes)
            message = reassembler.add(chunk)
            if message is None:
                return False
            waiting = self.complete.setdefault(client, deque(maxlen=MAX_PENDING))
            more = len(waiting) < MAX_PENDING
            waiting.append(message)
            return more

    def take(self, client: int) -> bytes | None:
        with self.lock:
            waiting = self.complete.get(client)
            return waiting.popleft() if waiting else None


class Latest:
    """The last announcement under each name; it replaces earlier ones."""

    def __init__(self, max_bytes: int) -> None:
        self.lock = threading.Lock()
        self.max_bytes = max_bytes  # of an announcement
        self.waiting: dict[str, bytes] = {}
        self.bytes = 0

    def put(self, name: str, message: bytes) -> bool:
        """Whether one more name can be taken now."""
        with self.lock:
            size = self.bytes + len(message) - len(self.waiting.get(name, b""))
            if len(message) > self.max_bytes or size + len(name) > MAX_WAITING:
                raise Refused(f"no room for an announcement of {len(message)} bytes")
            new = name not in self.waiting
            self.waiting[name] = message
            self.bytes = size + (len(name) if new else 0)
            return new

    def take(self, name: str) -> bytes:
        with self.lock:
            message = self.waiting.pop(name)
            self.bytes -= len(message) + len(name)
            return message
