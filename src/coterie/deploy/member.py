"""A device over MQTT: it says who it is, waits for letters, and answers them; in the end it leaves its models."""

from __future__ import annotations

import json
import logging
import queue
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData
from coterie.deploy.device import Device
from coterie.deploy.leave import leave_models
from coterie.deploy.parts import Plans, agreement_of, keep_terms, kept_terms, network_of
from coterie.deploy.roll import NAME, about, alike
from coterie.deploy.store import Store
from coterie.deploy.terms import MOST, NAMED, Brief, from_json, hello, to_json
from coterie.federation.disk import lock
from coterie.network.inbox import PENDING, Inbox, Latest, Parcels
from coterie.network.mqtt import Broker, Link
from coterie.network.wire import MOST_NOTE, Refused, checksum, printable

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
        plans: Plans,
        show: Callable[[str], None] = log.info,
        tell_classes: bool = False,  # whether the server may know how many samples of each class there are
    ) -> None:
        for what, word in (("device", device), ("federation", name)):
            if not NAME.fullmatch(word):
                raise CoterieError(f"'{word}' is no name for a {what}: letters, digits, '-', '_' and '.' only")
        self.root, self.name, self.plans, self.show = f"coterie/{name}", device, plans, show
        self.folder, self.data, self.ids, self.hello = plans.folder, data, ids, hello(device, data, ids, tell_classes)
        self.brief: Brief | None = None
        self.device: Device | None = None
        self.start, self.all = Parcels(0), Parcels(0)
        self.blobs: dict[str, bytes] = {}  # checksum -> what all are sent alike
        self.inbox = Inbox()
        self.waiting: dict[int, deque[bytes]] = {id: deque(maxlen=PENDING) for id in ids}  # letters not answered yet
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.said = Latest(MOST)  # by the server to all, and not looked at yet
        self.most, self.leaving = 0, False
        presence = f"{self.root}/presence/{device}"
        self.presence = presence
        will = presence, to_json(replace(self.hello, here=False))
        self.link = Link(broker, device, f"{self.root}/claim/{device}", self._up, self._heard, will)

    def run(self) -> Path | None:
        """Until the federation is over; the folder with the models of this device's clients."""
        with self._alone():
            return self._run()

    def _run(self) -> Path | None:
        self.link.open()
        self.show(f"{self.name} is at the broker, and waits for the server of '{self.root.removeprefix('coterie/')}'")
        try:
            while True:
                if self.link.ended:
                    raise CoterieError(f"{self.name} stops: {self.link.ended}")
                left = self._next(1.0)
                if left is not None:
                    return left
        finally:
            self.leaving = True
            self.link.close((self.presence, b""))

    def _next(self, seconds: float) -> Path | None:
        """The next thing that comes is done; what this device leaves, if that was the end."""
        try:
            what, content = self.events.get(timeout=seconds)
        except queue.Empty:
            return None
        left: Path | None = getattr(self, f"_{what}")(content if what == "letter" else self.said.take(what))
        return left

    def _alone(self) -> IO[Any]:
        """Two devices in one folder would write over each other's files."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").touch()
        except OSError as error:
            raise CoterieError(f"{self.folder} cannot be written to: {error.strerror}") from None
        return lock(self.folder / "lock")

    # What comes, on the thread of the link.

    def _up(self) -> None:
        told = ("config", "round/plan", f"refused/{self.name}", f"presence/{self.name}")
        self.link.listen(*(f"{self.root}/{topic}" for topic in told))
        if self.brief:
            self._listen()
        self.hello = replace(self.hello, visit=secrets.token_hex(4))
        self._greet()

    def _greet(self) -> None:
        self.link.say(self.presence, to_json(self.hello), retain=True)

    def _listen(self) -> None:
        own = (f"model/down/{self.name}/+", f"eval/ask/{self.name}/+", "model/start/+", "model/all/+")
        self.link.listen(*(f"{self.root}/{topic}" for topic in own))

    def _heard(self, topic: str, payload: bytes) -> None:
        branch = topic.removeprefix(f"{self.root}/")
        kind, _, last = branch.rpartition("/")
        try:
            if topic == self.presence:
                if payload != to_json(self.hello) and not self.leaving:
                    self._greet()  # a word of before, or of somebody else, came after ours
            elif branch == "config":
                if payload and from_json(Brief, payload):  # nothing else takes the place of good terms
                    self._note("config", payload)
            elif branch == "round/plan":
                self._note("over", ended(payload).encode())
            elif branch == f"refused/{self.name}":
                self._note("refused", payload)
            elif kind in ("model/start", "model/all"):
                start = kind == "model/start"
                if payload and (message := (self.start if start else self.all).add(payload)):
                    self._note("weights" if start else "blob", message)
            elif last.isdecimal() and int(last) in self.ids and self.inbox.add(int(last), payload, self.most):
                self.events.put(("letter", int(last)))
        except Refused as reason:
            log.warning("a message under %s is refused: %s", topic, reason)

    def _note(self, what: str, message: bytes) -> None:
        if message and self.said.put(what, message):
            self.events.put((what, None))

    # What is done about it.

    def _config(self, payload: bytes) -> None:
        brief = from_json(Brief, payload)
        if self.brief == brief:
            return
        try:
            if alike(brief.facts) != alike(self.hello.facts):
                raise CoterieError(
                    f"samples of the federation are {about(brief.facts)}, those here {about(self.hello.facts)}"
                )
            deal = agreement_of(brief, network_of(brief, self.plans), self.plans)
        except CoterieError as error:
            if self.device is None:
                raise
            log.warning("terms of another federation cannot be taken: %s", error)
            return
        self.brief, self.device = brief, None
        self.start, self.all = Parcels(deal.start.most), Parcels(deal.shared.most)
        self.most = deal.most_letter
        self.said.most = max(MOST, deal.start.most, deal.shared.most)
        self._listen()

    def _weights(self, message: bytes) -> None:
        """The first weights: with them all is there."""
        if self.brief is None or self.device or checksum(message) != self.brief.start:
            return
        self._begin(self.brief, message)
        told = f"{self.brief.method['name']}, {self.brief.clients} clients, {self.brief.rounds} rounds"
        self.show(f"the federation {self.brief.federation[:8]} begins: {told}; here: clients {self._own}")
        self.hello = replace(self.hello, ready=self.brief.federation)
        self._greet()

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
        for client, letters in self.waiting.items():
            for _ in range(len(letters)):
                self._answer(client, letters.popleft())

    def _letter(self, client: int) -> None:
        if (own := self.inbox.take(client)) is not None and not self._answer(client, own):
            self.link.listen(f"{self.root}/model/all/+")  # say it again, please

    def _answer(self, client: int, own: bytes) -> bool:
        """False: what all are sent alike is not here, and the letter waits for it."""
        if self.device is None:
            return True
        try:
            header = self.device.agreement.header_of(own)
            if header.shared and header.shared not in self.blobs:
                self.waiting[client].append(own)
                return False
            answer, trouble = self.device.answer(own, self.blobs.get(header.shared, b""))
        except Refused as reason:
            log.warning("a letter to client %d is refused: %s", client, reason)
            return True
        where = "ack" if trouble else {"train": "model/up", "score": "eval/report"}.get(header.kind, "ack")
        self.link.say_in_pieces(f"{self.root}/{where}/{self.name}/{client}", answer)
        if header.kind == "train":
            self.show(f"round {header.round + 1}: client {client} {'did not train' if trouble else 'trained'}")
        return True

    def _over(self, which: bytes) -> Path | None:
        """A federation has ended: what this device leaves, if it was part of it."""
        federation = which.decode()
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
        reason = printable(payload[:MOST_NOTE].decode(errors="replace"))
        if self.device is None:
            raise CoterieError(f"the server does not take this device: {reason}")
        log.warning("the server refused a message: %s", reason)

    @property
    def _own(self) -> str:
        return ", ".join(map(str, self.ids))


def ended(plan: bytes) -> str:
    """The federation that is over by this plan; nothing if none is."""
    try:
        told = json.loads(plan)
    except (ValueError, RecursionError):
        return ""
    federation = str(told.get("federation")) if isinstance(told, dict) and told.get("phase") == "over" else ""
    return federation if NAMED.fullmatch(federation) else ""
