"""A federation whose letters travel as bytes, without a network: devices are objects, the post is a queue."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch

from coterie.clients.remote import Answer, Event, Here, Patience, Post, Remote
from coterie.core.method import Census
from coterie.core.model import Model
from coterie.core.samples import FederatedData
from coterie.deploy.device import Device
from coterie.deploy.store import Store
from coterie.methods import AnyMethod
from coterie.network.letters import Agreement, Letter
from tests import toy

PATIENCE = Patience(deadline=60, wait=0.01)
FEDERATION = "ab" * 16
HOSTED = ((0, 3), (1,), (2, 4))  # which clients each device has


class Direct(Post):
    """Answers come at once."""

    def __init__(self, devices: list[Device]) -> None:
        self.devices = {i: device for device in devices for i in device.ids}
        self.events: deque[Event] = deque()
        self.absent: set[int] = set()
        self.refused: list[tuple[int, str]] = []

    def send(self, client: int, letter: Letter) -> None:
        self.events.append(Answer(client, self.devices[client].answer(letter.own, letter.shared)[0]))

    def receive(self, seconds: float) -> Event | None:
        return self.events.popleft() if self.events else None

    def present(self, client: int) -> bool:
        return client not in self.absent

    def refuse(self, client: int, reason: str) -> None:
        self.refused.append((client, reason))

    def plan(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        pass

    def over(self) -> None:
        pass

    def close(self) -> None:
        pass


def agreement(method: AnyMethod, model: Model, data: FederatedData, **more: Any) -> Agreement:
    splits = ("test",) if data.validation is None else ("test", "validation")
    given = {"seed": 7, "federation": FEDERATION} | more
    return Agreement(method, model, data.clients, data.shape, data.train.x.dtype, splits, **given)


def census(data: FederatedData) -> Census:
    counts = data.train.class_counts(data.classes)
    return Census(counts.sum(1), counts)


def devices(deal: Agreement, data: FederatedData, folder: Path) -> list[Device]:
    return [Device(deal, data.pick(ids), ids, Store(folder / f"device-{n}")) for n, ids in enumerate(HOSTED)]


def remote(method: AnyMethod, model: Model, data: FederatedData, folder: Path, post: type[Direct] = Direct) -> Remote:
    deal = agreement(method, model, data)
    return Remote(deal, census(data), post(devices(deal, data, folder)), PATIENCE)


def come_back(post: Direct, client: int) -> None:
    post.absent.discard(client)
    post.events.append(Here((client,)))


def small(name: str) -> tuple[AnyMethod, Model, FederatedData]:
    return toy.method(name, keep=True), toy.model(torch.float32), toy.toy()
