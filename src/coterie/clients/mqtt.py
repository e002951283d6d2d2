"""The server's post over MQTT: letters go out under the device of their client, answers come back under it."""

from __future__ import annotations

import json
import logging
import queue
from typing import Any

from coterie.clients.devices import Devices, Greet
from coterie.clients.remote import Answer, Event
from coterie.core.errors import CoterieError
from coterie.network.chunks import cut
from coterie.network.inbox import Inbox, Latest
from coterie.network.letters import Letter
from coterie.network.mqtt import Broker, Link
from coterie.network.wire import Refused, printable

log = logging.getLogger("coterie")
MOST_PRESENCE = 2**20  # bytes
FAREWELL = 60.0  # seconds to tell devices that it is over


class Mqtt(Devices):
    def __init__(self, broker: Broker, name: str, greet: Greet) -> None:
        super().__init__(greet)
        self.root = f"coterie/{name}"
        self.heard: dict[str, bytes] = {}  # device -> what it said last, since we are connected
        self.most = 0  # bytes of an answer; 0: none is taken yet
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.inbox = Inbox()
        self.said = Latest(MOST_PRESENCE)  # what devices said of themselves, and nobody has looked at yet
        self.kept: dict[str, tuple[bytes, bool]] = {}  # topic -> what the broker keeps, and whether in pieces
        self.link = Link(broker, f"{name}-server", f"{self.root}/server", self._up, self._heard)
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
            return self._presence(content, self.said.take(content))
        message = self.inbox.take(content)
        return None if message is None else Answer(content, message)

    def plan(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        told = {"phase": kind, "round": round + 1, "clients": clients, "deadline": seconds}
        self.keep("round/plan", json.dumps(told).encode())

    def refuse(self, client: int, reason: str) -> None:
        self._tell(self.owner[client], f"client {client}: {reason}")

    def over(self) -> None:
        self.keep("round/plan", json.dumps({"phase": "over", "federation": self.federation}).encode())
        for topic in [topic for topic in self.kept if topic != "round/plan"]:
            payload, pieces = self.kept.pop(topic)
            for part in [f"/{number}" for number in range(len(cut(payload)))] if pieces else [""]:
                self.link.say(f"{self.root}/{topic}{part}", b"", retain=True)  # a broker keeps nothing of this
        if not self.link.flush(FAREWELL):
            log.warning("there is no broker, so devices do not know that it is over; they will when it is resumed")

    def close(self) -> None:
        self.link.close()

    def keep(self, topic: str, payload: bytes, pieces: bool = False) -> None:
        """Said now, kept by the broker, and said again after every break."""
        self.kept[topic] = payload, pieces
        self._say(topic, payload, pieces)

    def announce(self, federation: str, brief: bytes, start: bytes, most: int) -> None:
        self.federation, self.most = federation, most
        self.keep("model/start", start, pieces=True)
        self.keep("config", brief)

    def _say(self, topic: str, payload: bytes, pieces: bool) -> None:
        self.traffic[1] += len(payload)
        if pieces:
            self.link.say_in_pieces(f"{self.root}/{topic}", payload, retain=True)
        else:
            self.link.say(f"{self.root}/{topic}", payload, retain=True)

    def _up(self) -> None:
        self.heard = {}  # who is still here says so again: answers may be lost
        branches = ("presence/+", "model/up/+/+", "eval/report/+/+", "ack/+/+")
        self.link.listen(*(f"{self.root}/{branch}" for branch in branches))
        for topic, (payload, pieces) in list(self.kept.items()):
            self._say(topic, payload, pieces)

    def _heard(self, topic: str, payload: bytes) -> None:
        """On the thread of the link: nothing is kept that is too long, or of nobody."""
        self.traffic[0] += len(payload)
        *branch, device, last = topic.removeprefix(f"{self.root}/").split("/")
        try:
            self._sort(branch, device, last, payload)
        except Refused as reason:
            log.warning("a message under %s is refused: %s", printable(topic), reason)
            self._tell(device if branch else last, f"{last}: {reason}")

    def _sort(self, branch: list[str], device: str, last: str, payload: bytes) -> None:
        if branch == [] and device == "presence":
            if self.said.put(last, payload):
                self.events.put(("presence", last))
            return
        client = int(last) if last.isdecimal() and len(last) < 9 else -1
        if not self.most or self.owner.get(client) != device:
            log.debug("a message of nobody who takes part")
        elif self.inbox.add(client, payload, self.most):
            self.events.put(("answer", client))

    def _presence(self, device: str, payload: bytes) -> Event | None:
        if self.heard.get(device) == payload:
            return None
        try:
            event = self.meet(device, payload)
        except Refused as reason:
            log.warning("the device %s is refused: %s", printable(device), reason)
            self._tell(device, str(reason))
            return None
        if device in self.here:
            self.heard[device] = payload
        else:
            self.heard.pop(device, None)
        return event

    def _tell(self, device: str, reason: str) -> None:
        self.link.say(f"{self.root}/refused/{device}", reason.encode())
