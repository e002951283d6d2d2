"""The server's end of the Flower transport.

A node processes one message at a time, in a new process each, so pending requests to a node are sent in one packet.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

from coterie.deploy.messages import Message
from coterie.deploy.transports.flower.connection import FlowerConnection, Packet
from coterie.deploy.transports.interface import AnswerReceived, DeviceDisconnected, Event
from coterie.deploy.transports.presence import DeviceTransport, Register
from coterie.deploy.wire import Refused, readable

log = logging.getLogger("coterie")
PAUSE = 0.3  # seconds between polls for replies
LOOK = 2.0  # seconds between polls for nodes
RETRY = 30.0  # seconds until a node that could not take part is asked again
HELLO = 600.0  # seconds for a node to send its hello
FAREWELL = 300.0  # seconds for nodes to save their models


class SentMessage(NamedTuple):
    """A packet without a reply."""

    node: int
    kind: str
    until: float  # when it times out


class FlowerTransport(DeviceTransport):
    def __init__(self, connection: FlowerConnection, register: Register) -> None:
        super().__init__(register)
        self.connection = connection
        self.nodes: dict[int, str] = {}  # connected node -> when it connected
        self.device: dict[int, str] = {}  # node -> name of its device
        self.retry: dict[int, float] = {}  # node that could not take part -> when it is asked again
        self.complaints: dict[int, str] = {}  # node -> its last error
        self.refusals: dict[int, str] = {}  # node -> why the server refused it, to be sent to the node once
        self.sent: dict[str, SentMessage] = {}
        self.outbox: dict[int, list[Message]] = {}  # node -> requests
        self.terms: tuple[bytes, ...] = ()
        self.events: deque[Event] = deque()
        self.max_answer, self.seconds, self.round, self.looked = 0, HELLO, 0, -LOOK

    def send(self, client: int, request: Message) -> None:
        """Queue a request; the next `receive` sends all requests to a node together."""
        node = self._node(self.owner[client])
        if node is not None:
            self.outbox.setdefault(node, []).append(request)

    def receive(self, seconds: float) -> Event | None:
        self._send_requests()
        if not self.events:
            self._poll_nodes()
            self._poll_replies()
        if not self.events:
            time.sleep(min(seconds, PAUSE))
        return self.events.popleft() if self.events else None

    def announce_phase(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        self.seconds, self.round = seconds, max(self.round, round + 1)

    def report_refusal(self, client: int, reason: str) -> None:
        """Only logged by the server: a message to the node would start a process there."""

    def announce(self, federation: str, terms: bytes, start: bytes, max_answer: int) -> None:
        self.federation, self.terms, self.max_answer = federation, (terms, start), max_answer
        for node in self.nodes:
            self._ask_hello(node)

    def end_federation(self) -> None:
        """Wait until the nodes have saved their models: Flower drops messages when the server ends."""
        packet = Packet({"federation": self.federation, "round": str(self.round)})
        for node in [node for node, device in self.device.items() if device in self.connected]:
            self._push(node, "over", packet, FAREWELL)
        while any(sent.kind == "over" for sent in self.sent.values()):
            self._poll_replies()
            time.sleep(PAUSE)

    def close(self) -> None:
        """The connection belongs to Flower, and ends with the run."""

    def _node(self, device: str) -> int | None:
        return next((node for node, name in self.device.items() if name == device), None)

    def _clients(self, node: int) -> tuple[int, ...]:
        device = self.device.get(node)
        return tuple(client for client, owner in self.owner.items() if owner == device)

    def _ask_hello(self, node: int) -> None:
        words = {"federation": self.federation}
        if node in self.refusals:
            words["refused"] = self.refusals.pop(node)
        self._push(node, "hello", Packet(words, self.terms), HELLO)

    def _send_requests(self) -> None:
        """Send pending requests, one packet per node."""
        for node, requests in self.outbox.items():
            shared = tuple({request.header.shared: request.shared for request in requests if request.shared}.values())
            words = {"federation": self.federation, "shared": str(len(shared))}
            own = tuple(request.own for request in requests)
            self._push(node, "requests", Packet(words, shared + own), self.seconds)
        self.outbox.clear()

    def _push(self, node: int, kind: str, packet: Packet, seconds: float) -> None:
        self.traffic[1] += sum(map(len, packet.parts))
        id = self.connection.push(node, kind, packet, seconds, str(self.round or ""))
        if id is not None:
            self.sent[id] = SentMessage(node, kind, time.monotonic() + seconds)

    def _poll_nodes(self) -> None:
        """Find nodes that connected or disconnected. A node that reconnected may have lost its messages."""
        now = time.monotonic()
        if now < self.looked + LOOK:
            return
        self.looked, found = now, self.connection.nodes()
        for node in self.nodes.keys() - found.keys():
            self._remove(node)
        for node, since in found.items():
            if self.nodes.get(node) != since or self.retry.get(node, now + 1) <= now:
                self._forget(node)
                self._ask_hello(node)
        self.nodes = found

    def _remove(self, node: int) -> None:
        self._disconnected(node)
        self._forget(node)
        self.device.pop(node, None)
        self.complaints.pop(node, None)

    def _disconnected(self, node: int) -> None:
        device = self.device.get(node, "")
        if device in self.connected:
            log.warning("%s disconnected", device)
            self.disconnect(device)
        self.events.append(DeviceDisconnected(self._clients(node)))

    def _forget(self, node: int) -> None:
        """Drop all messages to a node."""
        self.sent = {id: sent for id, sent in self.sent.items() if sent.node != node}
        self.outbox.pop(node, None)
        self.retry.pop(node, None)

    def _poll_replies(self) -> None:
        for id, packet in self.connection.pull(self.sent) if self.sent else ():
            if id in self.sent:
                self._take(self.sent.pop(id), packet)
        now = time.monotonic()
        for id, sent in [(id, sent) for id, sent in self.sent.items() if sent.until <= now]:
            del self.sent[id]
            self._complain(sent, "timed out")

    def _take(self, sent: SentMessage, packet: Packet) -> None:
        self.traffic[0] += sum(map(len, packet.parts))
        try:
            if "error" in packet.words:
                raise Refused(packet.words["error"])
            if sent.kind == "hello":
                self._take_hello(sent.node, packet)
            elif sent.kind == "requests":
                self._take_answers(sent.node, packet)
        except Refused as reason:
            new = self.complaints.get(sent.node) != readable(str(reason))
            if new and sent.kind == "hello" and "error" not in packet.words:
                self.refusals[sent.node] = readable(str(reason))
            self._complain(sent, str(reason))

    def _take_hello(self, node: int, packet: Packet) -> None:
        device = packet.words.get("device", "")
        other = self._node(device)
        if other not in (None, node) and other in self.nodes:
            raise Refused(f"another node is already connected as '{device[:80]}'; give this one another `device` name")
        if len(packet.parts) != 1:
            raise Refused("the reply has no hello")
        event = self.update_presence(device, packet.parts[0])
        if other is not None:
            self.device.pop(other)
        self.device[node] = device
        self.complaints.pop(node, None)
        self.refusals.pop(node, None)
        if event:
            self.events.append(event)

    def _take_answers(self, node: int, packet: Packet) -> None:
        own = set(self._clients(node))
        clients = [int(word) if word.isdecimal() else -1 for word in packet.words.get("clients", "").split()]
        if len(clients) != len(packet.parts) or not own.issuperset(clients):
            raise Refused("answers for clients of another node")
        if any(len(answer) > self.max_answer for answer in packet.parts):
            raise Refused(f"an answer is longer than the limit of {self.max_answer} bytes")
        if refused := packet.words.get("refused"):
            log.warning("%s refused a request: %s", self.device[node], readable(refused))
        self.events.extend(AnswerReceived(client, answer) for client, answer in zip(clients, packet.parts, strict=True))

    def _complain(self, sent: SentMessage, reason: str) -> None:
        """Log why a node failed, and ask for its hello again: at once if it took part before, else after RETRY."""
        node, reason = sent.node, readable(reason)
        known = self.device.get(node, f"node {node}")
        if self.complaints.get(node) != reason:
            log.warning("%s cannot take part: %s", known, reason)
        self.complaints[node] = reason
        if sent.kind == "over" or node not in self.nodes:
            return
        self._disconnected(node)
        self.retry[node] = time.monotonic() + (RETRY if sent.kind == "hello" else 0.0)
