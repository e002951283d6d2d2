"""A federation in one process whose messages travel as bytes: devices are objects, the transport is a queue."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch

from coterie.core.data import FederatedData
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model
from coterie.deploy.agreement import Agreement
from coterie.deploy.device import Device
from coterie.deploy.messages import Message
from coterie.deploy.pending import Timeouts
from coterie.deploy.remote import Remote
from coterie.deploy.store import Store
from coterie.deploy.transports.interface import AnswerReceived, Event, Transport
from tests import toy

TIMEOUTS = Timeouts(deadline=60, wait=0.01)
FEDERATION = "ab" * 16
HOSTED = ((0, 3), (1,), (2, 4))  # which clients each device has


class Direct(Transport):
    """Answers arrive immediately."""

    def __init__(self, devices: list[Device]) -> None:
        self.devices = {i: device for device in devices for i in device.ids}
        self.events: deque[Event] = deque()
        self.absent: set[int] = set()
        self.refused: list[tuple[int, str]] = []

    def send(self, client: int, request: Message) -> None:
        self.events.append(AnswerReceived(client, self.devices[client].answer(request.own, request.shared)[0]))

    def receive(self, seconds: float) -> Event | None:
        return self.events.popleft() if self.events else None

    def is_ready(self, client: int) -> bool:
        return client not in self.absent

    def report_refusal(self, client: int, reason: str) -> None:
        self.refused.append((client, reason))

    def announce_phase(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        pass

    def end_federation(self) -> None:
        pass

    def close(self) -> None:
        pass


def agreement(method: AnyMethod, model: Model, data: FederatedData, **more: Any) -> Agreement:
    splits = ("test",) if data.validation is None else ("test", "validation")
    given = {"seed": 7, "federation": FEDERATION} | more
    return Agreement(method, model, data.num_clients, data.shape, data.train.x.dtype, splits, **given)


def census(data: FederatedData) -> Census:
    counts = data.train.class_counts(data.classes)
    return Census(counts.sum(1), counts)


def devices(agreed: Agreement, data: FederatedData, folder: Path) -> list[Device]:
    return [Device(agreed, data.pick(ids), ids, Store(folder / f"device-{n}")) for n, ids in enumerate(HOSTED)]


def remote(
    method: AnyMethod, model: Model, data: FederatedData, folder: Path, transport: type[Direct] = Direct
) -> Remote:
    agreed = agreement(method, model, data)
    return Remote(agreed, census(data), transport(devices(agreed, data, folder)), TIMEOUTS)


def small(name: str) -> tuple[AnyMethod, Model, FederatedData]:
    return toy.method(name, keep_momentum=True), toy.model(torch.float32), toy.toy()
