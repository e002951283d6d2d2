"""What a device says of itself, and what the server says of the federation: JSON, read with care."""

from __future__ import annotations

import json
import re
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import torch

from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData, Transform
from coterie.network.letters import COMPRESS
from coterie.network.wire import PROTOCOL, Refused, printable
from coterie.version import VERSION

T = TypeVar("T")
MOST = 2**20  # bytes of such a message
MOST_ITEMS = 100_000
MOST_LETTERS = 10_000
MOST_NUMBER = 2**53
NAMED = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True)
class Facts:
    """What must be known of samples to build a network for them."""

    name: str
    classes: int
    class_names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    transform: Transform

    @staticmethod
    def of(data: FederatedData) -> Facts:
        dtype = str(data.train.x.dtype).removeprefix("torch.")
        return Facts(data.name, data.classes, data.class_names, data.shape, dtype, data.transform)


@dataclass(frozen=True)
class Hosted:
    """A client, as its device tells of it."""

    id: int
    counts: tuple[int, ...]  # training samples of each class; one number, of all, where classes are not told
    test: int  # samples
    validation: int | None


@dataclass(frozen=True)
class Hello:
    device: str
    facts: Facts
    clients: tuple[Hosted, ...]
    here: bool = True
    ready: str = ""  # the federation whose letters it can answer
    visit: str = ""  # another word each time it comes: what it was sent before may be lost
    protocol: int = PROTOCOL
    coterie: str = VERSION


@dataclass(frozen=True)
class Brief:
    """The federation, as the server tells of it; with the weights that all start from, a device needs nothing else."""

    federation: str
    digest: str  # of what both sides must agree on
    start: str  # checksum of the message with the first weights
    method: dict[str, Any]
    network: str | None
    head: str | None
    clients: int
    rounds: int
    splits: tuple[str, ...]
    seed: int
    compress: str
    facts: Facts
    protection: dict[str, Any] = field(default_factory=dict)
    protocol: int = PROTOCOL
    coterie: str = VERSION

    def __post_init__(self) -> None:
        if not all(map(NAMED.fullmatch, (self.federation, self.digest, self.start))):  # they name files too
            raise Refused("brief.federation, digest or start is no checksum")
        if self.compress not in COMPRESS or not set(self.splits) <= {"test", "validation"}:
            raise Refused("brief.compress or brief.splits is not known here")
        if min(self.clients, self.rounds) < 1:
            raise Refused("brief.clients and brief.rounds are at least 1")


def hello(device: str, data: FederatedData, ids: tuple[int, ...], tell_classes: bool = False) -> Hello:
    counts = data.train.class_counts(data.classes).tolist() if tell_classes else [[n] for n in data.train.sizes]
    held = [None] * len(ids) if data.validation is None else data.validation.sizes
    rows = zip(ids, counts, data.test.sizes, held, strict=True)
    return Hello(device, Facts.of(data), tuple(Hosted(i, tuple(c), test, v) for i, c, test, v in rows))


def to_json(told: Any) -> bytes:
    return json.dumps(asdict(told), ensure_ascii=False).encode()


def from_json(kind: type[T], message: bytes) -> T:
    """An object of this dataclass; Refused if the message is none, or of another protocol."""
    if len(message) > MOST:
        raise Refused(f"{len(message)} bytes are too many")
    try:
        told = json.loads(message.decode())
    except (ValueError, RecursionError):
        raise Refused("it is no JSON") from None
    if isinstance(told, dict) and told.get("protocol", PROTOCOL) != PROTOCOL:
        protocol, release = (printable(str(told.get(name))[:20]) for name in ("protocol", "coterie"))
        raise Refused(
            f"it speaks protocol {protocol} (Coterie {release}), here protocol {PROTOCOL} is spoken (Coterie "
            f"{VERSION}); bring both to the same version"
        )
    found: T = read(kind, told, kind.__name__.lower())
    return found


def read(kind: Any, told: Any, where: str) -> Any:
    """A value of this type, checked all the way down."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(told, dict) or told.keys() != {f.name for f in fields(kind)}:
            raise Refused(f"{where} has other fields than it must have")
        return kind(**{name: read(hints[name], value, f"{where}.{name}") for name, value in told.items()})  # type: ignore[operator]
    if isinstance(kind, types.UnionType):
        wanted = next(k for k in typing.get_args(kind) if k is not type(None))
        return None if told is None else read(wanted, told, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(told, list) or len(told) > MOST_ITEMS:
            raise Refused(f"{where} is no list, or too long")
        return tuple(read(typing.get_args(kind)[0], value, f"{where}[{i}]") for i, value in enumerate(told))
    if typing.get_origin(kind) is dict:
        if not isinstance(told, dict):
            raise Refused(f"{where} has no names")
        return told
    if not isinstance(told, kind | int if kind is float else kind) or isinstance(told, bool) != (kind is bool):
        raise Refused(f"{where} is not of the right kind")
    if isinstance(told, str) and (len(told) > MOST_LETTERS or not told.isprintable()):
        raise Refused(f"{where} is too long, or has letters that cannot be printed")
    if isinstance(told, int | float) and not -MOST_NUMBER <= told <= MOST_NUMBER:
        raise Refused(f"{where} is too large, or no number")
    return told


def dtype_of(facts: Facts) -> torch.dtype:
    found = getattr(torch, facts.dtype, None)
    if not isinstance(found, torch.dtype):
        raise CoterieError(f"'{facts.dtype}' is no type of numbers")
    return found
