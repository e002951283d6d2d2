"""What came and nobody has looked at yet: bounded, whatever is sent. One thread puts in, another takes out."""

from __future__ import annotations

import threading
from collections import deque

from coterie.network.chunks import HEAD, Pieces
from coterie.network.wire import Refused

BESIDE = 4  # messages of one sender that come in pieces at the same time
PENDING = 8  # and that are whole, but not looked at yet
MOST_WAITING = 2**26  # bytes of announcements that nobody has looked at yet


class Parcels:
    """Messages that come in pieces, a few at the same time, so that old pieces between new ones do no harm."""

    def __init__(self, most: int) -> None:
        self.most = most  # bytes of a message
        self.begun: dict[bytes, Pieces] = {}  # digest -> what came of it

    def add(self, piece: bytes) -> bytes | None:
        """The message, when this was its last piece."""
        digest = piece[: HEAD.size][:32]
        pieces = self.begun.pop(digest, None) or Pieces(self.most)
        message = pieces.add(piece)
        if message is None:
            self.begun[digest] = pieces  # the last one touched stands last
            if len(self.begun) > BESIDE:
                self.begun.pop(next(iter(self.begun)))
        return message


class Inbox:
    """Whole messages of each client, in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: dict[int, Parcels] = {}
        self.whole: dict[int, deque[bytes]] = {}

    def add(self, client: int, piece: bytes, most: int) -> bool:
        """Whether there is one more message to take now."""
        with self.lock:
            parcels = self.parts.get(client)
            if parcels is None or parcels.most != most:
                parcels = self.parts[client] = Parcels(most)
            message = parcels.add(piece)
            if message is None:
                return False
            waiting = self.whole.setdefault(client, deque(maxlen=PENDING))
            more = len(waiting) < PENDING
            waiting.append(message)
            return more

    def take(self, client: int) -> bytes | None:
        with self.lock:
            waiting = self.whole.get(client)
            return waiting.popleft() if waiting else None


class Latest:
    """The last announcement under each name; those before it count no more."""

    def __init__(self, most: int) -> None:
        self.lock = threading.Lock()
        self.most = most  # bytes of one
        self.waiting: dict[str, bytes] = {}
        self.bytes = 0

    def put(self, name: str, message: bytes) -> bool:
        """Whether there is one more name to take now."""
        with self.lock:
            size = self.bytes + len(message) - len(self.waiting.get(name, b""))
            if len(message) > self.most or size + len(name) > MOST_WAITING:
                raise Refused(f"it has {len(message)} bytes, more than there is room for")
            new = name not in self.waiting
            self.waiting[name] = message
            self.bytes = size + (len(name) if new else 0)
            return new

    def take(self, name: str) -> bytes:
        with self.lock:
            message = self.waiting.pop(name)
            self.bytes -= len(message) + len(name)
            return message
