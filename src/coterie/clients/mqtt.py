"""The server's post over MQTT: letters go out under the device of their client, answers come back under it."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from coterie.clients.remote import Answer, Event, Gone, Here, Post
from coterie.core.errors import CoterieError
from coterie.network.chunks import HEAD, Pieces
from coterie.network.letters import Letter
from coterie.network.mqtt import Broker, Link
from coterie.network.wire import Refused

log = logging.getLogger("coterie")
MOST_PRESENCE = 2**20  # bytes
MOST_DEVICES = 10_000  # that come at the same moment
BESIDE = 4  # messages of one client that come in pieces at the same time
PENDING = 8  # and that are whole, but not looked at yet
Greeting = tuple[tuple[int, ...], bool]  # the clients of a device, and whether it is there


class Mqtt(Post):
    """greet: is given the name of a device and what it says of itself; Refused if it cannot be part of this."""

    def __init__(self, broker: Broker, name: str, greet: Callable[[str, bytes], Greeting]) -> None:
        self.root, self.greet = f"coterie/{name}", greet
        self.owner: dict[int, str] = {}  # client -> device
        self.here: set[str] = set()
        self.federation = ""
        self.most = 0  # bytes of an answer; 0: none is taken yet
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.inbox = Inbox()
        self.said: dict[str, bytes] = {}  # what devices said of themselves, and nobody has looked at yet
        self.kept: dict[str, tuple[bytes, bool]] = {}  # topic -> what the broker keeps, and whether in pieces
        self.traffic = [0, 0]  # bytes received and sent
        self.link = Link(broker, f"{name}-server", self._up, self._heard)
        self.link.open()

    def send(self, client: int, letter: Letter) -> None:
        if letter.shared and self.kept.get("model/all", (b"",))[0] is not letter.shared:
            self.keep("model/all", letter.shared, pieces=True)
        where = "eval/ask" if letter.header.kind == "score" else "model/down"
        self.traffic[1] += len(letter.own)
        self.link.say_in_pieces(f"{self.root}/{where}/{self.owner[client]}/{client}", letter.own)

    def receive(self, seconds: float) -> Event | None:
        if self.link.ended:
            raise CoterieError(f"the server has no broker any more: {self.link.ended}")
        try:
            what, content = self.events.get(timeout=min(seconds, 1.0))
        except queue.Empty:
            return None
        if what == "presence":
            return self._presence(content, self.said.pop(content, b""))
        message = self.inbox.take(content)
        return None if message is None else Answer(content, message)

    def present(self, client: int) -> bool:
        return self.owner.get(client) in self.here

    def plan(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        told = {"phase": kind, "round": round + 1, "clients": clients, "deadline": seconds}
        self.keep("round/plan", json.dumps(told).encode())

    def refuse(self, client: int, reason: str) -> None:
        self._tell(self.owner[client], f"client {client}: {reason}")

    def over(self) -> None:
        self.keep("round/plan", json.dumps({"phase": "over", "federation": self.federation}).encode())
        for topic in ("config", "model/start/0", "model/all/0"):  # a broker keeps nothing under what is said so
            self.link.say(f"{self.root}/{topic}", b"", retain=True)
        self.link.flush()

    def close(self) -> None:
        self.link.close()

    def keep(self, topic: str, payload: bytes, pieces: bool = False) -> None:
        """Said now, kept by the broker, and said again after every break."""
        self.kept[topic] = payload, pieces
        self._say_kept(topic)

    def announce(self, federation: str, brief: bytes, start: bytes, most: int) -> None:
        """The federation begins. Devices are here again when they say that they are ready for it.

        most: bytes of an answer.
        """
        self.federation, self.most = federation, most
        self.here.clear()
        self.keep("model/start", start, pieces=True)
        self.keep("config", brief)

    def _say_kept(self, topic: str) -> None:
        payload, pieces = self.kept[topic]
        self.traffic[1] += len(payload)
        if pieces:
            self.link.say_in_pieces(f"{self.root}/{topic}", payload, retain=True)
        else:
            self.link.say(f"{self.root}/{topic}", payload, retain=True)

    def _up(self) -> None:
        branches = ("presence/+", "model/up/+/+", "eval/report/+/+", "ack/+/+")
        self.link.listen(*(f"{self.root}/{branch}" for branch in branches))
        for topic in list(self.kept):
            self._say_kept(topic)

    def _heard(self, topic: str, payload: bytes) -> None:
        """On the thread of the link: nothing is kept that is too long, or of nobody."""
        self.traffic[0] += len(payload)
        *branch, device, last = topic.removeprefix(f"{self.root}/").split("/")
        if branch == [] and device == "presence":
            if len(payload) <= MOST_PRESENCE and len(self.said) < MOST_DEVICES:
                self.said[last] = payload
                self.events.put(("presence", last))
            return
        client = int(last) if last.isdecimal() and len(last) < 9 else -1
        if not self.most or self.owner.get(client) != device:
            log.debug("a message under %s, of nobody who takes part", topic)
            return
        try:
            if self.inbox.add(client, payload, self.most):
                self.events.put(("answer", client))
        except Refused as reason:
            log.warning("a message of client %d is refused: %s", client, reason)
            self.refuse(client, str(reason))

    def _presence(self, device: str, payload: bytes) -> Event | None:
        if not payload:
            return None
        try:
            clients, here = self.greet(device, payload)
        except Refused as reason:
            log.warning("the device %s is refused: %s", device, reason)
            self._tell(device, str(reason))
            return None
        self.owner |= dict.fromkeys(clients, device)
        (self.here.add if here else self.here.discard)(device)
        return Here(clients) if here else Gone(clients)

    def _tell(self, device: str, reason: str) -> None:
        self.link.say(f"{self.root}/refused/{device}", reason.encode())


class Inbox:
    """Messages of clients: those that come in pieces, and those that are whole. A few of each, whatever is sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: dict[int, dict[bytes, Pieces]] = {}
        self.whole: dict[int, deque[bytes]] = {}

    def add(self, client: int, piece: bytes, most: int) -> bool:
        """Whether there is one more message to take now."""
        with self.lock:
            parts = self.parts.setdefault(client, {})
            digest = piece[: HEAD.size][:32]
            if digest not in parts and len(parts) == BESIDE:
                parts.pop(next(iter(parts)))
            message = parts.setdefault(digest, Pieces(most)).add(piece)
            if message is None:
                return False
            parts.pop(digest)
            waiting = self.whole.setdefault(client, deque(maxlen=PENDING))
            more = len(waiting) < PENDING
            waiting.append(message)
            return more

    def take(self, client: int) -> bytes | None:
        with self.lock:
            waiting = self.whole.get(client)
            return waiting.popleft() if waiting else None
