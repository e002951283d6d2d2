"""The server's post over Flower.

A node answers one message at a time, and each costs it a process, so letters that wait for the same node go in one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

from coterie.clients.devices import Devices, Greet
from coterie.clients.remote import Answer, Event, Gone
from coterie.network.flower import Line, Parcel
from coterie.network.letters import Letter
from coterie.network.wire import Refused, printable

log = logging.getLogger("coterie")
PAUSE = 0.3  # seconds between looks for replies
LOOK = 2.0  # seconds between looks for nodes that came or went
AGAIN = 30.0  # seconds until a node that could not take part is asked again
HELLO = 600.0  # seconds for a node to say who it is
FAREWELL = 300.0  # seconds for nodes to leave their models


class Sent(NamedTuple):
    """A message that is not answered yet."""

    node: int
    kind: str
    until: float  # when nobody waits for it any more


class Flower(Devices):
    def __init__(self, line: Line, greet: Greet) -> None:
        super().__init__(greet)
        self.line = line
        self.nodes: dict[int, str] = {}  # those that are there -> when they came
        self.device: dict[int, str] = {}  # node -> the device that it says it is
        self.again: dict[int, float] = {}  # node that could not take part -> when it is asked again
        self.complaints: dict[int, str] = {}  # node -> what was wrong with it last
        self.sent: dict[str, Sent] = {}
        self.outbox: dict[int, list[Letter]] = {}  # node -> letters
        self.terms: tuple[bytes, ...] = ()
        self.events: deque[Event] = deque()
        self.most, self.seconds, self.round, self.looked = 0, HELLO, 0, -LOOK

    def send(self, client: int, letter: Letter) -> None:
        """With the others to its node, when next somebody waits for answers."""
        node = self._node(self.owner[client])
        if node is not None:
            self.outbox.setdefault(node, []).append(letter)

    def receive(self, seconds: float) -> Event | None:
        self._post()
        if not self.events:
            self._look()
            self._pull()
        if not self.events:
            time.sleep(min(seconds, PAUSE))
        return self.events.popleft() if self.events else None

    def plan(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        self.seconds, self.round = seconds, max(self.round, round + 1)

    def refuse(self, client: int, reason: str) -> None:
        """The server's log says it; a message to the node would cost more than it is worth."""

    def announce(self, federation: str, brief: bytes, start: bytes, most: int) -> None:
        self.federation, self.terms, self.most = federation, (brief, start), most
        for node in self.nodes:
            self._hello(node)

    def over(self) -> None:
        """Waits until the nodes have left their models: what was not fetched when the server ends is lost."""
        told = Parcel({"federation": self.federation, "round": str(self.round)})
        for node in [node for node, device in self.device.items() if device in self.here]:
            self._push(node, "over", told, FAREWELL)
        while any(sent.kind == "over" for sent in self.sent.values()):
            self._pull()
            time.sleep(PAUSE)

    def close(self) -> None:
        """The line is Flower's, and ends with the run."""

    def _node(self, device: str) -> int | None:
        return next((node for node, name in self.device.items() if name == device), None)

    def _clients(self, node: int) -> tuple[int, ...]:
        device = self.device.get(node)
        return tuple(client for client, owner in self.owner.items() if owner == device)

    def _hello(self, node: int) -> None:
        self._push(node, "hello", Parcel({"federation": self.federation}, self.terms), HELLO)

    def _post(self) -> None:
        """Letters that wait, in one message to each node."""
        for node, letters in self.outbox.items():
            shared = tuple({letter.header.shared: letter.shared for letter in letters if letter.shared}.values())
            words = {"federation": self.federation, "shared": str(len(shared))}
            own = tuple(letter.own for letter in letters)
            self._push(node, "letters", Parcel(words, shared + own), self.seconds)
        self.outbox.clear()

    def _push(self, node: int, kind: str, parcel: Parcel, seconds: float) -> None:
        self.traffic[1] += sum(map(len, parcel.parts))
        name = self.line.push(node, kind, parcel, seconds, str(self.round or ""))
        if name is not None:
            self.sent[name] = Sent(node, kind, time.monotonic() + seconds)

    def _look(self) -> None:
        """Who came, and who went? A node that came back may have forgotten what it was sent."""
        now = time.monotonic()
        if now < self.looked + LOOK:
            return
        self.looked, found = now, self.line.nodes()
        for node in self.nodes.keys() - found.keys():
            self._gone(node)
        for node, came in found.items():
            if self.nodes.get(node) != came or self.again.get(node, now + 1) <= now:
                self._forget(node)
                self._hello(node)
        self.nodes = found

    def _gone(self, node: int) -> None:
        self._absent(node)
        self._forget(node)
        self.device.pop(node, None)
        self.complaints.pop(node, None)

    def _absent(self, node: int) -> None:
        device = self.device.get(node, "")
        if device in self.here:
            log.warning("%s is gone", device)
            self.leave(device)
        self.events.append(Gone(self._clients(node)))

    def _forget(self, node: int) -> None:
        """What was sent to it before."""
        self.sent = {name: sent for name, sent in self.sent.items() if sent.node != node}
        self.outbox.pop(node, None)
        self.again.pop(node, None)

    def _pull(self) -> None:
        for name, parcel in self.line.pull(self.sent) if self.sent else ():
            if name in self.sent:
                self._take(self.sent.pop(name), parcel)
        now = time.monotonic()
        for name, sent in [(name, sent) for name, sent in self.sent.items() if sent.until <= now]:
            del self.sent[name]
            self._complain(sent, "it does not answer")

    def _take(self, sent: Sent, parcel: Parcel) -> None:
        self.traffic[0] += sum(map(len, parcel.parts))
        try:
            if "trouble" in parcel.words:
                raise Refused(parcel.words["trouble"])
            if sent.kind == "hello":
                self._meet(sent.node, parcel)
            elif sent.kind == "letters":
                self._answers(sent.node, parcel)
        except Refused as reason:
            self._complain(sent, str(reason))

    def _meet(self, node: int, parcel: Parcel) -> None:
        device = parcel.words.get("device", "")
        other = self._node(device)
        if other not in (None, node) and other in self.nodes:
            raise Refused(f"another node speaks for '{device[:80]}' already; give this one another `device` name")
        if len(parcel.parts) != 1:
            raise Refused("it does not say who it is")
        event = self.meet(device, parcel.parts[0])
        if other is not None:
            self.device.pop(other)
        self.device[node] = device
        self.complaints.pop(node, None)
        if event:
            self.events.append(event)

    def _answers(self, node: int, parcel: Parcel) -> None:
        own = set(self._clients(node))
        clients = [int(word) if word.isdecimal() else -1 for word in parcel.words.get("clients", "").split()]
        if len(clients) != len(parcel.parts) or not own.issuperset(clients):
            raise Refused("it answers for clients that are not its own")
        if any(len(answer) > self.most for answer in parcel.parts):
            raise Refused(f"an answer of it is longer than the {self.most} bytes that it may have")
        if refused := parcel.words.get("refused"):
            log.warning("%s refused a letter: %s", self.device[node], printable(refused))
        self.events.extend(Answer(client, answer) for client, answer in zip(clients, parcel.parts, strict=True))

    def _complain(self, sent: Sent, reason: str) -> None:
        """A node that could not do what it was asked to: it is asked anew who it is, at once if it was here before."""
        node, reason = sent.node, printable(reason)
        known = self.device.get(node, f"node {node}")
        if self.complaints.get(node) != reason:
            log.warning("%s cannot take part: %s", known, reason)
        self.complaints[node] = reason
        if sent.kind == "over" or node not in self.nodes:
            return
        self._absent(node)
        self.again[node] = time.monotonic() + (AGAIN if sent.kind == "hello" else 0.0)
