"""The device's end of the MQTT transport: it joins a federation, answers requests, and saves its models at the end."""

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

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.deploy.device import Device
from coterie.deploy.device_models import save_models
from coterie.deploy.device_setup import (
    DevicePolicy,
    accept_terms,
    agreement_from_terms,
    device_from_terms,
    load_terms,
    network_from_terms,
)
from coterie.deploy.handshake import HEX_ID, MAX_BYTES, Terms, from_json, hello, to_json
from coterie.deploy.inbox import MAX_PENDING, Inbox, Latest, Reassembler
from coterie.deploy.membership import check_name
from coterie.deploy.roster import load_identity, sign
from coterie.deploy.sample_schema import difference
from coterie.deploy.store import federation_folder
from coterie.deploy.transports.mqtt.connection import Broker, MqttConnection
from coterie.deploy.wire import MAX_NOTE, Refused, checksum, readable
from coterie.runs.disk import lock, writing

log = logging.getLogger("coterie")
BRANCHES = {"train": "model/up", "score": "eval/report", "score_global": "eval/report"}  # topics of answers
SHARED = 2  # shared parts of requests that are kept: the current one and the one before


class MqttDevice:
    """show: prints a line for the user."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        device: str,
        data: FederatedData,
        ids: tuple[int, ...],
        policy: DevicePolicy,
        show: Callable[[str], None] = log.info,
        tell_classes: bool = False,  # send class counts to the server
    ) -> None:
        check_name("device", device)
        check_name("federation", name)
        self.root, self.name, self.policy, self.show = f"coterie/{name}", device, policy, show
        self.folder, self.data, self.ids, self.hello = policy.folder, data, ids, hello(device, data, ids, tell_classes)
        self.key: Any = None  # private key that signs the hello
        if broker.cert and broker.key:
            certificate, self.key = load_identity(broker.cert, broker.key)
            self.hello = replace(self.hello, certificate=certificate)
        self.terms: Terms | None = None
        self.device: Device | None = None
        self.start_chunks, self.shared_chunks = Reassembler(0), Reassembler(0)
        self.shared: dict[str, bytes] = {}  # checksum -> shared part of requests
        self.inbox = Inbox()
        self.waiting: dict[int, deque[bytes]] = {id: deque(maxlen=MAX_PENDING) for id in ids}  # for their shared part
        self.events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()  # kind, and the client of a request
        self.announcements = Latest(MAX_BYTES)  # of the server to all devices, not processed yet
        self.handlers: dict[str, Callable[[bytes], Path | None]] = {
            "terms": self._take_terms,
            "weights": self._take_weights,
            "shared": self._take_shared,
            "over": self._end,
            "refused": self._refused,
        }
        self.max_request, self.leaving = 0, False
        self.presence = f"{self.root}/presence/{device}"
        will = self.presence, to_json(replace(self.hello, connected=False))
        claim = f"{self.root}/claim/{device}"
        self.connection = MqttConnection(broker, device, claim, self._on_connect, self._on_message, will)

    def run(self) -> Path | None:
        """Take part until the federation ends; returns the folder with the models of this device's clients."""
        with self._lock():
            return self._run()

    def _run(self) -> Path | None:
        self.connection.open()
        federation = self.root.removeprefix("coterie/")
        self.show(f"{self.name} is connected to the broker; waiting for the server of '{federation}'")
        try:
            while True:
                if self.connection.ended:
                    raise CoterieError(f"{self.name} stopped: {self.connection.ended}")
                saved = self._process_event(1.0)
                if saved is not None:
                    return saved
        finally:
            self.leaving = True
            self.connection.close((self.presence, b""))

    def _process_event(self, seconds: float) -> Path | None:
        """Process the next event, if any; returns the folder with the models at the end of the federation."""
        try:
            kind, client = self.events.get(timeout=seconds)
        except queue.Empty:
            return None
        if kind != "request":
            return self.handlers[kind](self.announcements.take(kind))
        if (own := self.inbox.take(client)) is not None and not self._answer(client, own):
            self.connection.subscribe(f"{self.root}/model/all/+")  # makes the broker send retained messages again
        return None

    def _lock(self) -> IO[Any]:
        """Prevent two devices from using one folder."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").touch()
        return lock(self.folder / "lock")

    # On the connection's thread.

    def _on_connect(self) -> None:
        topics = ("config", "round/plan", f"refused/{self.name}", f"presence/{self.name}")
        self.connection.subscribe(*(f"{self.root}/{topic}" for topic in topics))
        if self.terms:
            self._subscribe()
        self._say_hello(session=secrets.token_hex(4))

    def _say_hello(self, **changes: Any) -> None:
        """Publish the hello of this device, with these changes."""
        if changes:
            self.hello = replace(self.hello, **changes)
            self.hello = sign(self.hello, self.key) if self.key else self.hello
        self.connection.publish(self.presence, to_json(self.hello), retain=True)

    def _subscribe(self) -> None:
        topics = (f"model/down/{self.name}/+", f"eval/ask/{self.name}/+", "model/start/+", "model/all/+")
        self.connection.subscribe(*(f"{self.root}/{topic}" for topic in topics))

    def _on_message(self, topic: str, payload: bytes) -> None:
        branch = topic.removeprefix(f"{self.root}/")
        kind, _, last = branch.rpartition("/")
        try:
            if topic == self.presence:
                if payload != to_json(self.hello) and not self.leaving:
                    self._say_hello()  # an old or forged hello replaced ours
            elif branch == "config":
                if payload and from_json(Terms, payload):  # only valid terms replace earlier ones
                    self._announced("terms", payload)
            elif branch == "round/plan":
                self._announced("over", ended_federation(payload).encode())
            elif branch == f"refused/{self.name}":
                self._announced("refused", payload)
            elif kind in ("model/start", "model/all"):
                start = kind == "model/start"
                if payload and (message := (self.start_chunks if start else self.shared_chunks).add(payload)):
                    self._announced("weights" if start else "shared", message)
            elif last.isdecimal() and int(last) in self.ids and self.inbox.add(int(last), payload, self.max_request):
                self.events.put(("request", int(last)))
        except Refused as reason:
            log.warning("refused a message on %s: %s", topic, reason)

    def _announced(self, kind: str, message: bytes) -> None:
        if message and self.announcements.put(kind, message):
            self.events.put((kind, -1))

    # On the main thread.

    def _take_terms(self, payload: bytes) -> None:
        terms = from_json(Terms, payload)
        if self.terms == terms:
            return
        try:
            if found := difference("this device", self.hello.schema, "the federation", terms.schema):
                raise CoterieError(found)
            agreement = agreement_from_terms(terms, network_from_terms(terms, self.policy), self.policy)
        except CoterieError as error:
            if self.device is None:
                raise
            log.warning("rejected the terms of another federation: %s", error)
            return
        self.terms, self.device = terms, None
        self.start_chunks = Reassembler(agreement.start.max_bytes)
        self.shared_chunks = Reassembler(agreement.max_shared)
        self.max_request = agreement.max_request
        self.announcements.max_bytes = max(MAX_BYTES, agreement.start.max_bytes, agreement.max_shared)
        self._subscribe()

    def _take_weights(self, message: bytes) -> None:
        """The initial weights: with the terms, all that is needed to begin."""
        if self.terms is None or self.device or checksum(message) != self.terms.start:
            return
        self._begin(self.terms, message)
        summary = f"{self.terms.method['name']}, {self.terms.clients} clients, {self.terms.rounds} rounds"
        own = ", ".join(map(str, self.ids))
        self.show(f"federation {self.terms.federation[:8]} begins: {summary}; clients on this device: {own}")
        self._say_hello(ready=self.terms.federation)

    def _begin(self, terms: Terms, start: bytes) -> None:
        agreement = accept_terms(terms, start, self.policy)
        self.device = device_from_terms(terms, agreement, self.data, self.ids, self.policy)

    def _take_shared(self, message: bytes) -> None:
        self.shared[checksum(message)] = message
        for old in list(self.shared)[:-SHARED]:
            del self.shared[old]
        for client, requests in self.waiting.items():
            for _ in range(len(requests)):
                self._answer(client, requests.popleft())

    def _answer(self, client: int, own: bytes) -> bool:
        """Answer a request; returns False if it has to wait for its shared part."""
        if self.device is None:
            return True
        try:
            header = self.device.agreement.header_of(own)
            if header.shared and header.shared not in self.shared:
                self.waiting[client].append(own)
                return False
            answer, failed = self.device.answer(own, self.shared.get(header.shared, b""))
        except Refused as reason:
            log.warning("refused a request to client %d: %s", client, reason)
            return True
        branch = "ack" if failed else BRANCHES.get(header.kind, "ack")
        self.connection.publish_chunks(f"{self.root}/{branch}/{self.name}/{client}", answer)
        if header.kind == "train":
            self.show(f"round {header.round + 1}: client {client} {'did not train' if failed else 'trained'}")
        return True

    def _end(self, which: bytes) -> Path | None:
        """A federation has ended: save the models, if this device took part in it."""
        federation = which.decode()
        folder = federation_folder(self.folder, federation)
        if self.device is None or self.device.agreement.federation != federation:
            terms = load_terms(folder, federation)  # it ended while this device was disconnected
            if terms is None or (folder / "run").exists():
                return None  # not ours, or saved already
            self._begin(*terms)
            self.terms = terms[0]
        assert self.device is not None
        assert self.terms is not None
        if self.device.record is not None:
            self.show(self.device.record.summary(self.ids))
        return save_models(self.device, self.terms, folder / "run", self.policy)

    def _refused(self, payload: bytes) -> None:
        reason = readable(payload[:MAX_NOTE].decode(errors="replace"))
        if self.device is None:
            raise CoterieError(f"the server refused this device: {reason}")
        log.warning("the server refused a message: %s", reason)


def ended_federation(plan: bytes) -> str:
    """The id of the federation that has ended by this plan; empty if none has."""
    try:
        content = json.loads(plan)
    except (ValueError, RecursionError):
        return ""
    federation = str(content.get("federation")) if isinstance(content, dict) and content.get("phase") == "over" else ""
    return federation if HEX_ID.fullmatch(federation) else ""
