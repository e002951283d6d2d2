"""The server's end of the MQTT transport: each client has its own topics, under the name of its device."""

from __future__ import annotations

import json
import logging
import queue
from typing import Any

from coterie.core.errors import CoterieError
from coterie.deploy.chunks import to_chunks
from coterie.deploy.inbox import Inbox, Latest
from coterie.deploy.messages import Message
from coterie.deploy.transports.interface import AnswerReceived, Event
from coterie.deploy.transports.mqtt.connection import Broker, MqttConnection
from coterie.deploy.transports.presence import DeviceTransport, Register
from coterie.deploy.wire import Refused, readable

log = logging.getLogger("coterie")
MAX_PRESENCE = 2**20  # bytes
FAREWELL = 60.0  # seconds to announce the end of the federation


class MqttTransport(DeviceTransport):
    def __init__(self, broker: Broker, name: str, register: Register) -> None:
        super().__init__(register)
        self.root = f"coterie/{name}"
        self.hellos: dict[str, bytes] = {}  # device -> its last hello on this connection
        self.max_answer = 0  # bytes; 0: no answers are accepted yet
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.inbox = Inbox()
        self.announcements = Latest(MAX_PRESENCE)  # hellos that were not processed yet
        self.retained: dict[str, tuple[bytes, bool]] = {}  # topic -> payload, and whether it is sent in chunks
        self.connection = MqttConnection(
            broker, f"{name}-server", f"{self.root}/server", self._on_connect, self._on_message
        )
        self.connection.open()

    def send(self, client: int, request: Message) -> None:
        if request.shared and self.retained.get("model/all", (b"",))[0] is not request.shared:
            self.retain("model/all", request.shared, chunked=True)
        branch = "eval/ask" if request.header.kind in ("score", "score_global") else "model/down"
        self.traffic[1] += len(request.own)
        self.connection.publish_chunks(f"{self.root}/{branch}/{self.owner[client]}/{client}", request.own)

    def receive(self, seconds: float) -> Event | None:
        if self.connection.ended:
            raise CoterieError(f"the server lost its broker: {self.connection.ended}")
        try:
            kind, sender = self.events.get(timeout=min(seconds, 1.0))
        except queue.Empty:
            return None
        if kind == "presence":
            return self._presence(sender, self.announcements.take(sender))
        message = self.inbox.take(sender)
        return None if message is None else AnswerReceived(sender, message)

    def announce_phase(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        plan = {"phase": kind, "round": round + 1, "clients": clients, "deadline": seconds}
        self.retain("round/plan", json.dumps(plan).encode())

    def report_refusal(self, client: int, reason: str) -> None:
        self._refuse(self.owner[client], f"client {client}: {reason}")

    def end_federation(self) -> None:
        self.retain("round/plan", json.dumps({"phase": "over", "federation": self.federation}).encode())
        for topic in [topic for topic in self.retained if topic != "round/plan"]:
            payload, chunked = self.retained.pop(topic)
            for part in [f"/{number}" for number in range(len(to_chunks(payload)))] if chunked else [""]:
                self.connection.publish(f"{self.root}/{topic}{part}", b"", retain=True)  # deletes the retained message
        if not self.connection.flush(FAREWELL):
            log.warning("no broker: devices do not know that the federation has ended; --resume informs them")

    def close(self) -> None:
        self.connection.close()

    def retain(self, topic: str, payload: bytes, chunked: bool = False) -> None:
        """Publish a retained message; it is published again after every reconnection."""
        self.retained[topic] = payload, chunked
        self._publish(topic, payload, chunked)

    def announce(self, federation: str, terms: bytes, start: bytes, max_answer: int) -> None:
        self.federation, self.max_answer = federation, max_answer
        self.retain("model/start", start, chunked=True)
        self.retain("config", terms)

    def _publish(self, topic: str, payload: bytes, chunked: bool) -> None:
        self.traffic[1] += len(payload)
        if chunked:
            self.connection.publish_chunks(f"{self.root}/{topic}", payload, retain=True)
        else:
            self.connection.publish(f"{self.root}/{topic}", payload, retain=True)

    def _on_connect(self) -> None:
        self.hellos = {}  # process all hellos again: answers may have been lost
        branches = ("presence/+", "model/up/+/+", "eval/report/+/+", "ack/+/+")
        self.connection.subscribe(*(f"{self.root}/{branch}" for branch in branches))
        for topic, (payload, chunked) in list(self.retained.items()):
            self._publish(topic, payload, chunked)

    def _on_message(self, topic: str, payload: bytes) -> None:
        """On the connection's thread. Messages that are too long or of unknown senders are not stored."""
        self.traffic[0] += len(payload)
        *branch, device, last = topic.removeprefix(f"{self.root}/").split("/")
        try:
            self._dispatch(branch, device, last, payload)
        except Refused as reason:
            log.warning("refused a message on %s: %s", readable(topic), reason)
            self._refuse(device if branch else last, f"{last}: {reason}")

    def _dispatch(self, branch: list[str], device: str, last: str, payload: bytes) -> None:
        if branch == [] and device == "presence":
            if self.announcements.put(last, payload):
                self.events.put(("presence", last))
            return
        client = int(last) if last.isdecimal() and len(last) < 9 else -1
        if not self.max_answer or self.owner.get(client) != device:
            log.debug("ignored a message of an unknown sender")
        elif self.inbox.add(client, payload, self.max_answer):
            self.events.put(("answer", client))

    def _presence(self, device: str, hello: bytes) -> Event | None:
        if self.hellos.get(device) == hello:
            return None
        try:
            event = self.update_presence(device, hello)
        except Refused as reason:
            log.warning("refused device %s: %s", readable(device), reason)
            self._refuse(device, str(reason))
            return None
        if device in self.connected:
            self.hellos[device] = hello
        else:
            self.hellos.pop(device, None)
        return event

    def _refuse(self, device: str, reason: str) -> None:
        self.connection.publish(f"{self.root}/refused/{device}", reason.encode())
