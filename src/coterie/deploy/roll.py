"""Who is in a federation: what the devices said of themselves, put together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from coterie.core.method import Census
from coterie.core.samples import Transform
from coterie.deploy.terms import Facts, Hello, from_json
from coterie.network.wire import Refused, checksum

MOST_NUMBERS = 2**24  # of a sample
MOST_CLASSES = 2**17
MOST_SAMPLES = 2**40  # of a client
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Roll:
    """Filled as devices come. A client belongs to the device that named it first."""

    def __init__(self, clients: int) -> None:
        self.clients = clients  # m
        self.devices: dict[str, Hello] = {}
        self.owner: dict[int, str] = {}  # client -> device

    def greet(self, device: str, payload: bytes) -> tuple[tuple[int, ...], str | None]:
        """What a device says of itself, or nothing if it has left: its clients, the federation it is ready for."""
        said = from_json(Hello, payload) if payload else None
        if said is not None and said.device != device:
            raise Refused(f"it calls itself {said.device[:80]}")
        known = self.devices.get(device)
        if said is not None and said.here:
            self.add(said)
            return tuple(client.id for client in said.clients), said.ready
        if not self.full:
            self.remove(device)  # nothing has begun: another one may bring its clients
        return () if known is None else tuple(client.id for client in known.clients), None

    def add(self, said: Hello) -> None:
        """Refused if it cannot be part of this federation, with the reason."""
        self._check(said)
        said = replace(said, here=True, ready="", visit="")
        if self.full and self.devices.get(said.device, said) != said:
            raise Refused("it has other clients or other data than when the federation began")
        for other in self.devices.values():
            if other.device != said.device and alike(other.facts) != alike(said.facts):
                raise Refused(f"its samples are {about(said.facts)}, those of {other.device} {about(other.facts)}")
        self.remove(said.device)
        self.devices[said.device] = said
        self.owner |= {client.id: said.device for client in said.clients}

    def remove(self, device: str) -> None:
        self.devices.pop(device, None)
        self.owner = {client: other for client, other in self.owner.items() if other != device}

    def _check(self, said: Hello) -> None:
        if not NAME.fullmatch(said.device):
            raise Refused("its name has letters that a name of a device cannot have")
        check_facts(said.facts)
        if not said.clients:
            raise Refused("it has no clients")
        for client in said.clients:
            if not 0 <= client.id < self.clients:
                raise Refused(f"it has client {client.id}, and clients are 0 to {self.clients - 1}")
            owner = self.owner.get(client.id, said.device)
            if owner != said.device:
                raise Refused(f"client {client.id} is on the device {owner} already")
            counts = (*client.counts, client.test, client.validation or 0)
            if len(client.counts) not in (1, said.facts.classes) or min(counts) < 0 or sum(counts) > MOST_SAMPLES:
                raise Refused(f"what it says of client {client.id} cannot be")
            if sum(client.counts) == 0:
                raise Refused(f"client {client.id} has no samples to train with")
        if len({client.id for client in said.clients}) < len(said.clients):
            raise Refused("it names a client twice")

    @property
    def full(self) -> bool:
        return len(self.owner) == self.clients

    @property
    def missing(self) -> list[int]:
        return [client for client in range(self.clients) if client not in self.owner]

    @property
    def rows(self) -> list[Any]:
        """What is known of client 0, 1, ..."""
        known = {client.id: client for said in self.devices.values() for client in said.clients}
        return [known[client] for client in range(self.clients)]

    @property
    def census(self) -> Census:
        """Classes are zero where not all devices tell of them: no method asks for them, only pictures do."""
        rows, classes = self.rows, self.facts.classes
        told = all(len(client.counts) == classes for client in rows)
        counts = torch.tensor([client.counts if told else (0,) * classes for client in rows])
        return Census(torch.tensor([sum(client.counts) for client in rows]), counts)

    @property
    def splits(self) -> tuple[str, ...]:
        """That all clients can be measured on."""
        held = all(client.validation is not None for client in self.rows)
        return ("test", "validation") if held else ("test",)

    @property
    def facts(self) -> Facts:
        """Of all samples together. Where devices normalise by their own samples, mean and deviation are pooled."""
        found = [said for _, said in sorted(self.devices.items())]  # whoever came first
        transforms = [said.facts.transform for said in found]
        if all(transform == transforms[0] for transform in transforms):
            return found[0].facts
        samples = [sum(sum(client.counts) for client in said.clients) for said in found]
        return replace(found[0].facts, transform=pooled(transforms, samples))

    def about(self) -> Mapping[str, Any]:
        """For config.json, as of clients that are here."""
        facts, rows = self.facts, self.rows
        return {
            "name": facts.name,
            "clients": self.clients,
            "classes": facts.classes,
            "class_names": list(facts.class_names),
            "shape": list(facts.shape),
            "dtype": facts.dtype,
            "train_sizes": [sum(client.counts) for client in rows],
            "test_sizes": [client.test for client in rows],
            "content": checksum(*(repr((client, self.owner[client.id])) for client in rows)),
            "new_content": None,
            "transform": vars(facts.transform),
            "partition": None,
        }


def check_facts(facts: Facts) -> None:
    """What a network can be built for, within reason."""
    sides = facts.shape
    possible = 1 <= len(sides) <= 4 and min(sides) >= 1 and math.prod(sides) <= MOST_NUMBERS
    if not possible or not 1 <= facts.classes <= MOST_CLASSES:
        raise Refused(f"its samples are {about(facts)}, which cannot be")
    if not isinstance(getattr(torch, facts.dtype, None), torch.dtype):
        raise Refused(f"'{facts.dtype[:80]}' is no type of numbers")
    if len(facts.class_names) not in (0, facts.classes):
        raise Refused(f"it names {len(facts.class_names)} of {facts.classes} classes")
    mean, std = facts.transform.mean, facts.transform.std
    if len(mean) != len(std) or not all(value > 0 for value in std) or not 0 <= facts.transform.crop <= max(sides):
        raise Refused("how it normalises or crops its samples cannot be")


def alike(facts: Facts) -> tuple[Any, ...]:
    """What must be the same everywhere."""
    sides = (len(facts.transform.mean), len(facts.transform.std), facts.transform.crop, facts.transform.flip)
    return facts.classes, facts.class_names, facts.shape, facts.dtype, sides


def about(facts: Facts) -> str:
    return f"{facts.dtype} {facts.shape} of {facts.classes} classes"


def pooled(transforms: list[Transform], samples: list[int]) -> Transform:
    """Mean and deviation of all samples together, from those of the parts."""
    weight = torch.tensor(samples, dtype=torch.float64)[:, None] / sum(samples)
    mean, std = (torch.tensor([getattr(t, name) for t in transforms], dtype=torch.float64) for name in ("mean", "std"))
    middle = (weight * mean).sum(0)
    spread = (weight * (std.square() + (mean - middle).square())).sum(0).sqrt()
    return replace(transforms[0], mean=tuple(middle.tolist()), std=tuple(spread.tolist()))
