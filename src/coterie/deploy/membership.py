"""The devices and clients of a federation, collected from the hellos of devices."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from coterie.core.errors import CoterieError, some_of
from coterie.core.method import Census
from coterie.core.task import Task
from coterie.deploy.handshake import Hello, HostedClient, SampleSchema, from_json, read
from coterie.deploy.roster import Roster, fingerprint
from coterie.deploy.sample_schema import difference, pooled, pooled_task
from coterie.deploy.task_schema import check_task
from coterie.deploy.wire import Refused, checksum

MAX_INPUTS = 2**24  # values of a sample
MAX_CLASSES = 2**17
MAX_SAMPLES = 10_000_000  # of a client
TYPES = ("uint8", "bool", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")  # of samples
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def check_name(what: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise CoterieError(f"invalid {what} name '{name}': use letters, digits, '-', '_' and '.'")


class Membership:
    """Grows as devices join. A client belongs to the device in the roster, or else to the first that announces it."""

    def __init__(
        self,
        num_clients: int,
        roster: Roster | None = None,
        max_samples: int = MAX_SAMPLES,
        robust: bool = False,
        task: type[Task] | None = None,
    ) -> None:
        """max_samples: of one client. robust: pool statistics of samples by medians. task: the server's own, if any."""
        self.task = task
        self.num_clients, self.roster, self.max_samples, self.robust = num_clients, roster, max_samples, robust
        self.devices: dict[str, Hello] = {}
        self.owner: dict[int, str] = {}  # client -> device

    def register(self, device: str, payload: bytes) -> tuple[tuple[int, ...], str | None]:
        """Process the hello of a device; an empty payload means that it disconnected.

        Returns its clients and the id of the federation that it is ready for; None if it is not connected.
        """
        hello = from_json(Hello, payload) if payload else None
        if hello is not None and hello.device != device:
            raise Refused(f"the hello names another device: {hello.device[:80]}")
        known = self.devices.get(device)
        if hello is not None and hello.connected:
            self.add(hello)
            return tuple(client.id for client in hello.clients), hello.ready
        if not self.full:
            self.remove(device)  # the federation has not begun: another device may host its clients
        return () if known is None else tuple(client.id for client in known.clients), None

    def restore(self, hellos: Iterable[Mapping[str, Any]]) -> None:
        """Restore the devices of an interrupted run from the hellos in its folder."""
        for content in hellos:
            hello = read(Hello, content)
            self.devices[hello.device] = hello
            self.owner |= {client.id: hello.device for client in hello.clients}

    def add(self, hello: Hello) -> None:
        """Raise `Refused`, with the reason, for a device that cannot take part."""
        self._check(hello)
        hello = replace(hello, connected=True, ready="", session="", signature="")
        known = self.devices.get(hello.device, hello)
        if self.full and known != hello:
            raise Refused(f"device {hello.device} changed {changed(known, hello)} since the federation began")
        if known.certificate not in ("", hello.certificate):
            raise Refused(f"device {hello.device} is already connected with another certificate")
        for other in self.devices.values():
            sides = f"device {hello.device}", hello.schema, f"device {other.device}", other.schema
            if other.device != hello.device and (found := difference(*sides)):
                raise Refused(found)
        self.remove(hello.device)
        self.devices[hello.device] = hello
        self.owner |= {client.id: hello.device for client in hello.clients}

    def remove(self, device: str) -> None:
        self.devices.pop(device, None)
        self.owner = {client: other for client, other in self.owner.items() if other != device}

    def _check(self, hello: Hello) -> None:
        if not NAME.fullmatch(hello.device):
            raise Refused("invalid device name: use letters, digits, '-', '_' and '.'")
        check_schema(hello.schema, self.task)
        fingerprint(hello)
        if not hello.clients:
            raise Refused("the device hosts no clients")
        for client in hello.clients:
            if not 0 <= client.id < self.num_clients:
                raise Refused(f"client {client.id} is out of range: clients are 0 to {self.num_clients - 1}")
            owner = self.owner.get(client.id, hello.device)
            if owner != hello.device:
                raise Refused(f"client {client.id} is already hosted by device {owner}")
            if self.roster:
                self.roster.check(client.id, hello)
            counts = (*client.counts, client.test, client.validation or 0)
            if len(client.counts) not in (1, hello.schema.classes or 1) or min(counts) < 0:
                raise Refused(f"invalid sample counts for client {client.id}: {listed_counts(counts)}")
            if sum(counts) > self.max_samples:
                raise Refused(
                    f"client {client.id} claims {sum(counts)} samples, more than the limit of {self.max_samples} "
                    "(--max-samples of the server)"
                )
            if sum(client.counts) == 0:
                raise Refused(f"client {client.id} has no training samples")
        if len({client.id for client in hello.clients}) < len(hello.clients):
            raise Refused("a client is listed twice")

    @property
    def full(self) -> bool:
        return len(self.owner) == self.num_clients

    @property
    def missing(self) -> list[int]:
        return [client for client in range(self.num_clients) if client not in self.owner]

    def label(self, client: int) -> str:
        """The client's number, with its name and device if known."""
        device = self.owner.get(client)
        if device is None:
            return str(client)
        name = next(c.name for c in self.devices[device].clients if c.id == client)
        return f"{client} ({', '.join(filter(None, (name, f'on {device}')))})"

    @property
    def names(self) -> list[str]:
        """Of clients 0, 1, ...; empty for clients without a name."""
        return [client.name for client in self.rows]

    def labels(self, clients: Iterable[int], most: int = 20) -> str:
        return some_of([self.label(client) for client in clients], most)

    @property
    def rows(self) -> list[HostedClient]:
        """Clients 0, 1, ..., as their devices announced them."""
        known = {client.id: client for hello in self.devices.values() for client in hello.clients}
        return [known[client] for client in range(self.num_clients)]

    @property
    def census(self) -> Census:
        """Class counts are zero unless all devices share them; only reports use them, methods do not."""
        rows, classes = self.rows, self.schema.classes
        shared = all(len(client.counts) == classes for client in rows)
        counts = torch.tensor([client.counts if shared else (0,) * classes for client in rows], dtype=torch.int64)
        return Census(torch.tensor([sum(client.counts) for client in rows]), counts)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that all clients have."""
        held = all(client.validation is not None for client in self.rows)
        return ("test", "validation") if held else ("test",)

    @property
    def held(self) -> dict[str, list[int]]:
        """Split -> number of samples that each client announced."""
        return {split: [getattr(client, split) for client in self.rows] for split in self.splits}

    @property
    def schema(self) -> SampleSchema:
        """The schema of all samples. Mean and standard deviation are pooled where devices use their own.

        The name, on which default settings depend, is the most common one.
        """
        found = [hello for _, hello in sorted(self.devices.items())]  # independent of the order of arrival
        names = Counter(hello.schema.name for hello in found)
        schema = replace(found[0].schema, name=names.most_common(1)[0][0])
        samples = [sum(sum(client.counts) for client in hello.clients) for hello in found]
        schema = replace(schema, task=pooled_task([hello.schema.task for hello in found], samples, self.robust))
        transforms = [hello.schema.transform for hello in found]
        if all(transform == transforms[0] for transform in transforms):
            return schema
        return replace(schema, transform=pooled(transforms, samples, self.robust))

    def about(self) -> Mapping[str, Any]:
        """The "data" section of config.json."""
        schema, rows = self.schema, self.rows
        return {
            "name": schema.name,
            "clients": self.num_clients,
            "classes": schema.classes,
            "class_names": list(schema.class_names),
            "client_names": self.names if any(self.names) else [],
            "shape": list(schema.shape),
            "label_shape": list(schema.task.label_shape),
            "dtype": schema.dtype,
            "train_sizes": [sum(client.counts) for client in rows],
            "test_sizes": [client.test for client in rows],
            "content": checksum(*(repr((client, self.owner[client.id])) for client in rows)),
            "new_content": None,
            "transform": asdict(schema.transform),
            "partition": None,
        }


def check_schema(schema: SampleSchema, task: type[Task] | None = None) -> None:
    """Raise `Refused` unless a network can be built for such samples."""
    sides = schema.shape
    possible = 1 <= len(sides) <= 4 and min(sides) >= 1 and math.prod(sides) <= MAX_INPUTS
    if not possible or not 0 <= schema.classes <= MAX_CLASSES:
        raise Refused(f"unsupported: {schema.dtype[:80]} samples of shape {sides} in {schema.classes} classes")
    check_task(schema.task, schema.classes, task)
    if schema.dtype not in TYPES:
        raise Refused(f"unknown sample type '{schema.dtype[:80]}'; known: {', '.join(TYPES)}")
    if schema.classes and len(schema.class_names) not in (0, schema.classes):
        raise Refused(f"{len(schema.class_names)} class names for {schema.classes} classes")
    mean, std = schema.transform.mean, schema.transform.std
    if len(mean) != len(std) or not all(value > 0 for value in std) or not 0 <= schema.transform.crop <= max(sides):
        raise Refused("invalid normalization or cropping of samples")
    if schema.transform.inputs:
        raise Refused("samples with several inputs; federations of devices support one")
    check_inputs(schema)


def check_inputs(schema: SampleSchema) -> None:
    """Raise `Refused` unless columns, channels and fill values match the shape of a sample."""
    columns, axis, mean = schema.transform.columns, schema.transform.axis, schema.transform.mean
    if columns and schema.shape != (len(columns),):
        raise Refused(f"{len(columns)} columns for samples of shape {schema.shape}")
    for column in columns:
        if column.categories and column.fill is not None and column.fill not in range(len(column.categories)):
            raise Refused(
                f"column '{column.name[:80]}' is filled with category {column.fill:g} of {len(column.categories)}"
            )
    inputs = schema.transform.input_shape(schema.shape)
    if math.prod(inputs) > MAX_INPUTS:
        raise Refused(f"samples have {math.prod(inputs)} inputs, more than the limit of {MAX_INPUTS}")
    if not 0 <= axis < len(inputs) or len(mean) not in (0, 1, inputs[axis]):
        raise Refused(f"{len(mean)} means for inputs of shape {inputs} with channels along axis {axis}")


def changed(before: Hello, now: Hello) -> str:
    """Describe what changed between two hellos of a device."""
    found = difference("now it", now.schema, "before it", before.schema)
    if found:
        return f"its data ({found})"
    if before.certificate != now.certificate:
        return "its certificate"
    if (before.coterie, before.protocol) != (now.coterie, now.protocol):
        return f"its version of Coterie ({before.coterie} to {now.coterie})"
    return "its clients, their names or their numbers of samples"


def listed_counts(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts[:10])) + (", ..." if len(counts) > 10 else "")
