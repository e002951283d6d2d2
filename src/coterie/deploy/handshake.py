"""The hello of a device and the terms of a federation, as validated JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from coterie.core.data import FederatedData, Transform
from coterie.core.errors import CoterieError
from coterie.core.validation import Limits, fitting
from coterie.core.version import VERSION
from coterie.deploy.agreement import COMPRESS
from coterie.deploy.task_schema import TaskSchema
from coterie.deploy.wire import PROTOCOL, Refused, readable

T = TypeVar("T")
MAX_BYTES = 2**20  # of a JSON message
LIMITS = Limits(items=100_000, letters=10_000, number=2**53)
HEX_ID = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True)
class SampleSchema:
    """Shape, type, classes and preprocessing of samples: what a network is built from."""

    name: str
    classes: int
    class_names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    transform: Transform
    task: TaskSchema

    @property
    def raw_sample(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a sample before preprocessing."""
        return self.shape, dtype_of(self)

    @staticmethod
    def of(data: FederatedData) -> SampleSchema:
        dtype = str(data.train.x.dtype).removeprefix("torch.")
        labels = data.classes, data.class_names
        return SampleSchema(data.name, *labels, data.shape, dtype, data.transform, TaskSchema.of(data))


@dataclass(frozen=True)
class HostedClient:
    """A client, as its device announces it."""

    id: int
    counts: tuple[int, ...]  # training samples per class, or their total where class counts are not shared
    test: int  # number of samples
    validation: int | None
    name: str = ""


@dataclass(frozen=True)
class Hello:
    """How a device introduces itself to the server."""

    device: str
    schema: SampleSchema
    clients: tuple[HostedClient, ...]
    connected: bool = True
    ready: str = ""  # id of the federation whose terms it has accepted
    session: str = ""  # changes with every connection: earlier requests may be lost
    certificate: str = ""  # of the device, base64 of DER; optional
    signature: str = ""  # of this hello with an empty signature, by the certificate's key
    protocol: int = PROTOCOL
    coterie: str = VERSION


@dataclass(frozen=True)
class Terms:
    """The terms of a federation: with the initial weights, all that a device needs to take part."""

    federation: str
    digest: str  # of the agreement
    start: str  # checksum of the message with the initial weights
    method: dict[str, Any]
    network: str | None
    head: str | None
    clients: int
    rounds: int
    splits: tuple[str, ...]
    seed: int
    compress: str
    schema: SampleSchema
    protection: dict[str, Any] = field(default_factory=dict)
    train_only: str | None = None  # the parameters that are trained
    protocol: int = PROTOCOL
    coterie: str = VERSION

    def __post_init__(self) -> None:
        if not all(map(HEX_ID.fullmatch, (self.federation, self.digest, self.start))):  # they become file names
            raise Refused("terms.federation, terms.digest and terms.start must be checksums")
        if self.compress not in COMPRESS or not set(self.splits) <= {"test", "validation"}:
            raise Refused("terms.compress or terms.splits has an unknown value")
        if min(self.clients, self.rounds) < 1:
            raise Refused("terms.clients and terms.rounds must be at least 1")


def hello(device: str, data: FederatedData, ids: tuple[int, ...], tell_classes: bool = False) -> Hello:
    by_class = tell_classes and data.classes > 0
    counts = data.train.class_counts(data.classes).tolist() if by_class else [[n] for n in data.train.sizes]
    held = [None] * len(ids) if data.validation is None else data.validation.sizes
    names = [readable(name) for name in data.client_names] or [""] * len(ids)
    rows = zip(ids, counts, data.test.sizes, held, names, strict=True)
    return Hello(
        device, SampleSchema.of(data), tuple(HostedClient(i, tuple(c), test, v, name) for i, c, test, v, name in rows)
    )


def to_json(message: Any) -> bytes:
    return json.dumps(asdict(message), ensure_ascii=False).encode()


def from_json(kind: type[T], message: bytes) -> T:
    """Decode an object of this dataclass; raises `Refused` for an invalid message or another protocol version."""
    if len(message) > MAX_BYTES:
        raise Refused(f"too long: {len(message)} bytes (limit: {MAX_BYTES})")
    try:
        content = json.loads(message.decode())
    except (ValueError, RecursionError):
        raise Refused("not valid JSON") from None
    if isinstance(content, dict) and content.get("protocol", PROTOCOL) != PROTOCOL:
        protocol, release = (readable(str(content.get(name))[:20]) for name in ("protocol", "coterie"))
        raise Refused(
            f"protocol version mismatch: received {protocol} (Coterie {release}), expected {PROTOCOL} (Coterie "
            f"{VERSION}); install the same version of Coterie on both sides"
        )
    return read(kind, content)


def read(kind: type[T], content: Any) -> T:
    """Validate decoded JSON as this dataclass."""
    try:
        found: T = fitting(kind.__name__.lower(), content, kind, LIMITS)
        return found
    except (CoterieError, RecursionError) as error:
        raise Refused(readable(str(error))) from None


def dtype_of(schema: SampleSchema) -> torch.dtype:
    found = getattr(torch, schema.dtype, None)
    if not isinstance(found, torch.dtype):
        raise CoterieError(f"unknown sample type '{schema.dtype}'")
    return found
