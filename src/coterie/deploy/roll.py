"""Who is in a federation: what the devices said of themselves, put together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from coterie.core.method import Census
from coterie.core.samples import Transform
from coterie.deploy.terms import Facts, Hello
from coterie.network.wire import Refused, checksum

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Roll:
    """Filled as devices come. A client belongs to the device that named it first."""

    def __init__(self, clients: int) -> None:
        self.clients = clients  # m
        self.devices: dict[str, Hello] = {}
        self.owner: dict[int, str] = {}  # client -> device

    def add(self, said: Hello) -> None:
        """Refused if it cannot be part of this federation, with the reason."""
        self._check(said)
        said = replace(said, here=True, ready="")
        if self.full and self.devices.get(said.device, said) != said:
            raise Refused("it has other clients or other data than when the federation began")
        for other in self.devices.values():
            if other.device != said.device and alike(other.facts) != alike(said.facts):
                raise Refused(f"its samples are {about(said.facts)}, those of {other.device} {about(other.facts)}")
        self.devices[said.device] = said
        self.owner |= {client.id: said.device for client in said.clients}

    def _check(self, said: Hello) -> None:
        if not NAME.fullmatch(said.device):
            raise Refused("its name has letters that a name of a device cannot have")
        if not said.clients:
            raise Refused("it has no clients")
        for client in said.clients:
            if not 0 <= client.id < self.clients:
                raise Refused(f"it has client {client.id}, and clients are 0 to {self.clients - 1}")
            owner = self.owner.get(client.id, said.device)
            if owner != said.device:
                raise Refused(f"client {client.id} is on the device {owner} already")
            if len(client.counts) != said.facts.classes or min(client.counts, default=-1) < 0 or client.test < 0:
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
        counts = torch.tensor([client.counts for client in self.rows])
        return Census(counts.sum(1), counts)

    @property
    def splits(self) -> tuple[str, ...]:
        """That all clients can be measured on."""
        held = all(client.validation is not None for client in self.rows)
        return ("test", "validation") if held else ("test",)

    @property
    def facts(self) -> Facts:
        """Of all samples together. Where devices normalise by their own samples, mean and deviation are pooled."""
        found = list(self.devices.values())
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
