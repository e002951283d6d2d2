"""A device over MQTT: it says who it is, waits for letters, and answers them; in the end it leaves its models."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.clients.mqtt import Inbox
from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData
from coterie.deploy.device import Device
from coterie.deploy.leave import leave_models
from coterie.deploy.parts import Plans, agreement_of, keep_terms, kept_terms, network_of
from coterie.deploy.roll import NAME
from coterie.deploy.store import Store
from coterie.deploy.terms import MOST, Brief, from_json, hello, to_json
from coterie.network.chunks import Pieces
from coterie.network.mqtt import Broker, Link
from coterie.network.wire import Refused, checksum

log = logging.getLogger("coterie")
BLOBS = 2  # messages to all that are kept: the last one, and the one before


class Member:
    """show: is given a line for people."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        device: str,
        data: FederatedData,
        ids: tuple[int, ...],
        folder: Path,
        plans: Plans,
        show: Callable[[str], None] = log.info,
    ) -> None:
        if not NAME.fullmatch(device):
            raise CoterieError(f"'{device}' is no name for a device: letters, digits, '-', '_' and '.' only")
        self.root, self.name, self.folder, self.plans, self.show = f"coterie/{name}", device, folder, plans, show
        self.data, self.ids, self.hello = data, ids, hello(device, data, ids)
        self.brief: Brief | None = None
        self.device: Device | None = None
        self.start, self.all = Pieces(0), Pieces(0)
        self.blobs: dict[str, bytes] = {}  # checksum -> what all are sent alike
        self.inbox, self.waiting = Inbox(), dict[int, bytes]()  # letters that wait for such a message
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.over = threading.Event()
        self.most = 0
        presence = f"{self.root}/presence/{device}"
        self.presence = presence
        self.link = Link(broker, device, self._up, self._heard, (presence, to_json(replace(self.hello, here=False))))

    def run(self) -> Path | None:
        """Until the federation is over; the folder with the models of this device's clients."""
        self.link.open()
        self.show(f"{self.name} is at the broker, and waits for the server of '{self.root.removeprefix('coterie/')}'")
        try:
            while True:
                if self.link.ended:
                    raise CoterieError(f"{self.name} stops: {self.link.ended}")
                try:
                    what, content = self.events.get(timeout=1.0)
                except queue.Empty:
                    continue
                left: Path | None = getattr(self, f"_{what}")(content)
                if left is not None:
                    return left
        finally:
            self.link.close((self.presence, b""))

    # What comes, on the thread of the link.

    def _up(self) -> None:
        self.link.listen(*(f"{self.root}/{topic}" for topic in ("config", "round/plan", f"refused/{self.name}")))
        if self.brief:
            self._listen()
        self.link.say(self.presence, to_json(self.hello), retain=True)

    def _listen(self) -> None:
        own = (f"model/down/{self.name}/+", f"eval/ask/{self.name}/+", "model/start/+", "model/all/+")
        self.link.listen(*(f"{self.root}/{topic}" for topic in own))

    def _heard(self, topic: str, payload: bytes) -> None:
        branch = topic.removeprefix(f"{self.root}/")
        kind, _, last = branch.rpartition("/")
        try:
            if branch in ("config", "round/plan", f"refused/{self.name}"):
                if payload and len(payload) <= MOST:
                    self.events.put((branch.split("/")[0], payload))
            elif kind in ("model/start", "model/all"):
                if payload and (message := (self.start if kind == "model/start" else self.all).add(payload)):
                    self.events.put(("weights" if kind == "model/start" else "blob", message))
            elif last.isdecimal() and int(last) in self.ids and self.inbox.add(int(last), payload, self.most):
                self.events.put(("letter", int(last)))
        except Refused as reason:
            log.warning("a message under %s is refused: %s", topic, reason)

    # What is done about it.

    def _config(self, payload: bytes) -> None:
        try:
            brief = from_json(Brief, payload)
        except Refused as reason:
            raise CoterieError(f"the server's terms cannot be taken: {reason}") from None
        if self.brief == brief:
            return
        deal = agreement_of(brief, network_of(brief, self.plans), self.plans)
        self.brief, self.device = brief, None
        self.start, self.all = Pieces(deal.start.most), Pieces(deal.shared.most)
        self.most = deal.most_letter
        self._listen()

    def _weights(self, message: bytes) -> None:
        """The first weights: with them all is there."""
        if self.brief is None or self.device or checksum(message) != self.brief.start:
            return
        self._begin(self.brief, message)
        told = f"{self.brief.method['name']}, {self.brief.clients} clients, {self.brief.rounds} rounds"
        self.show(f"the federation {self.brief.federation[:8]} begins: {told}; here: clients {self._own}")
        self.hello = replace(self.hello, ready=self.brief.federation)
        self.link.say(self.presence, to_json(self.hello), retain=True)

    def _begin(self, brief: Brief, start: bytes) -> None:
        deal = agreement_of(brief, network_of(brief, self.plans, start), self.plans)
        if deal.digest != brief.digest:
            raise CoterieError(
                "server and device do not agree on method, model or settings: are both of the same version of "
                "Coterie and torch, and is --model the same?"
            )
        folder = self.folder / brief.federation[:16]
        keep_terms(folder, brief, start)
        data = replace(self.data, transform=brief.facts.transform)
        self.device = Device(deal, data, self.ids, Store(folder))

    def _blob(self, message: bytes) -> None:
        self.blobs[checksum(message)] = message
        for old in list(self.blobs)[:-BLOBS]:
            del self.blobs[old]
        for client in list(self.waiting):
            self._answer(client)

    def _letter(self, client: int) -> None:
        while (own := self.inbox.take(client)) is not None:
            self.waiting[client] = own  # the last one counts: nobody waits for an answer to the others
        if client in self.waiting:
            self._answer(client)

    def _answer(self, client: int) -> None:
        if self.device is None:
            return
        try:
            header = self.device.agreement.header_of(self.waiting[client])
            if header.shared and header.shared not in self.blobs:
                return  # on its way
            own, shared = self.waiting.pop(client), self.blobs.get(header.shared, b"")
            answer, trouble = self.device.answer(own, shared)
        except Refused as reason:
            self.waiting.pop(client, None)
            log.warning("a letter to client %d is refused: %s", client, reason)
            return
        where = "ack" if trouble else {"train": "model/up", "score": "eval/report"}.get(header.kind, "ack")
        self.link.say_in_pieces(f"{self.root}/{where}/{self.name}/{client}", answer)
        if header.kind == "train":
            self.show(f"round {header.round + 1}: client {client} {'did not train' if trouble else 'trained'}")

    def _round(self, payload: bytes) -> Path | None:
        """What the server plans; if it is over, what this device leaves."""
        try:
            told = json.loads(payload)
        except ValueError:
            return None
        if not isinstance(told, dict) or told.get("phase") != "over":
            return None
        federation = str(told.get("federation", ""))
        if self.device is None or self.device.agreement.federation != federation:
            terms = kept_terms(self.folder / federation[:16], federation)  # it ended while this device was away
            if terms is None or (self.folder / federation[:16] / "run").exists():
                return None  # of others, or long ago
            self._begin(*terms)
            self.brief = terms[0]
        assert self.device is not None
        assert self.brief is not None
        return leave_models(self.device, self.brief, self.folder / federation[:16] / "run")

    def _refused(self, payload: bytes) -> None:
        reason = "".join(c if c.isprintable() else " " for c in payload[:500].decode(errors="replace"))
        if self.device is None:
            raise CoterieError(f"the server does not take this device: {reason}")
        log.warning("the server refused a message: %s", reason)

    @property
    def _own(self) -> str:
        return ", ".join(map(str, self.ids))
