"""Messages as bytes and back, and the guard at the door.

A message is a safetensors file: a table of names, types, shapes and places, a header of a few words, then the numbers.
Both sides know beforehand which table a message must have, so only one that is byte for byte the expected one is
opened, and nothing is allocated for one that is not. Never pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core import tree

PROTOCOL = 1  # of all that is said between server and devices
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
MOST_HEADER = 4096  # bytes of the words of a header
MOST_NOTE = 500  # letters of a reason
LENGTH = 8  # bytes that say how long table and header are
KINDS = ("start", "shared", "join", "train", "score", "finish", "trouble")
WORD = re.compile(r"[0-9a-f]{0,64}")
WHOLE = re.compile(r"-?[0-9]{1,9}")


class Refused(Exception):
    """A message is not what it must be; the text is for its sender and for the log."""


class Header(NamedTuple):
    """What is said beside the numbers."""

    kind: str  # one of KINDS
    federation: str = ""  # which one, in hexadecimal
    schema: str = ""  # checksum of all that server and devices must agree on
    client: int = -1
    round: int = -1
    rate: float = 1.0  # factor on the learning rate
    base: str = ""  # version of what the client remembers: before
    made: str = ""  # and after
    shared: str = ""  # checksum of the message with the part that all are sent alike
    measure: int = 0  # whether the client is to be measured too
    note: str = ""  # a reason, in words


@dataclass(frozen=True)
class Schema:
    """The tensors that a message must have: names, types, shapes."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # in the order they are written

    @staticmethod
    def of(form: object, lossy: torch.dtype | None = None) -> Schema:
        """lossy: the type in which floating-point numbers travel."""
        listed = [(name, t.dtype, tuple(t.shape)) for name, t in tree.items(form)]
        if lossy is not None:
            listed = [(n, lossy if d in (torch.float32, torch.float64) else d, s) for n, d, s in listed]
        return Schema(tuple(sorted(listed, key=lambda entry: (-entry[1].itemsize, entry[0]))))  # so that all is aligned

    @cached_property
    def table(self) -> bytes:
        """All that comes before the words of the header."""
        told, at = dict[str, Any](), 0
        for name, dtype, shape in self.entries:
            end = at + math.prod(shape) * dtype.itemsize
            told[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(told, separators=(",", ":"))[:-1]
        return f'{text}{"," if told else ""}"__metadata__":'.encode()

    @cached_property
    def size(self) -> int:
        """Bytes of the numbers."""
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.entries)

    @property
    def most(self) -> int:
        """Bytes of the longest message of this form, also of one that zstd could not make smaller."""
        return LENGTH + len(self.table) + MOST_HEADER + self.size + self.size // 128

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.table).hexdigest()


def seal(header: Header, tensors: Mapping[str, Tensor], schema: Schema) -> bytes:
    """The bytes of a message."""
    top = schema.table + written({name: text(value) for name, value in header._asdict().items()})
    top += b" " * (-len(top) % 8)
    parts = [raw(tensors[name], dtype, shape) for name, dtype, shape in schema.entries]
    return b"".join([len(top).to_bytes(LENGTH, "little"), top, *parts])


def written(words: dict[str, str]) -> bytes:
    return json.dumps(words, separators=(",", ":")).encode() + b"}"


def text(value: object) -> str:
    return value[:MOST_NOTE] if isinstance(value, str) else repr(value)


def raw(t: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    if tuple(t.shape) != shape:
        raise ValueError(f"a tensor of shape {tuple(t.shape)} where {shape} is sent")
    return t.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def body(message: bytes) -> memoryview:
    """The numbers of a message that was let in, or made here."""
    return memoryview(message)[LENGTH + int.from_bytes(message[:LENGTH], "little") :]


def peek(message: bytes, schema: Schema) -> Header:
    """The header of a message that has exactly this table and this size."""
    if len(message) < LENGTH:
        raise Refused(f"{len(message)} bytes are no message")
    length = int.from_bytes(message[:LENGTH], "little")
    if length > len(schema.table) + MOST_HEADER:
        raise Refused(f"its table takes {length} bytes, more than the {len(schema.table) + MOST_HEADER} it may")
    if len(message) != LENGTH + length + schema.size:
        wanted = LENGTH + length + schema.size
        raise Refused(f"it has {len(message)} bytes and must have {wanted}: cut off, too long, or of another model")
    top = message[LENGTH : LENGTH + length]
    if not top.startswith(schema.table):
        raise Refused("its tensors have other names, shapes or types than those of this federation")
    return read_words(top[len(schema.table) :])


def read_words(told: bytes) -> Header:
    """Written exactly as `seal` does it: what can be said in one way only cannot be said twice, or hidden."""
    try:
        words = json.loads(told.rstrip(b" ")[:-1])
    except (ValueError, RecursionError):
        raise Refused("its header cannot be read") from None
    if not isinstance(words, dict) or tuple(words) != Header._fields:
        raise Refused(f"its header has other fields than those of protocol {PROTOCOL}")
    if not all(isinstance(word, str) and len(word) <= MOST_NOTE for word in words.values()):
        raise Refused("a field of its header is no text, or too long")
    if written(words) != told.rstrip(b" "):
        raise Refused("its header is not written as it must be")
    return typed(words)


def typed(words: dict[str, str]) -> Header:
    """Each field checked."""
    if words["kind"] not in KINDS:
        raise Refused("it is of a kind that does not exist")
    for name in ("federation", "schema", "base", "made", "shared"):
        if not WORD.fullmatch(words[name]):
            raise Refused(f"the field '{name}' of its header is no checksum")
    for name in ("client", "round", "measure"):
        if not WHOLE.fullmatch(words[name]):
            raise Refused(f"the field '{name}' of its header is no number")
    try:
        rate = float(words["rate"])
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise Refused("the field 'rate' of its header is no factor")
    whole = {name: int(words[name]) for name in ("client", "round", "measure")}
    return Header(**{**words, **whole, "rate": rate, "note": printable(words["note"])})  # type: ignore[arg-type]


def printable(text: str) -> str:
    """What others wrote, for a line of a log."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:MOST_NOTE])


def unseal(message: bytes, schema: Schema, form: object | None = None) -> tree.Tree:
    """The tensors of a message that was peeked into, by dotted name; in memory of their own, as torch gives it.

    form: a tree whose types they shall have, where they travelled in others.
    """
    numbers, at, found = np.frombuffer(body(message), np.uint8), 0, dict[str, Tensor]()
    for name, dtype, shape in schema.entries:
        t = torch.empty(shape, dtype=dtype)
        end = at + t.numel() * dtype.itemsize
        if dtype == torch.bool and t.numel() and int(numbers[at:end].max()) > 1:
            raise Refused(f"{name} has values that are neither true nor false")
        if t.numel():
            t.view(-1).view(torch.uint8).numpy()[:] = numbers[at:end]
        found[name], at = t, end
    if form is not None:
        found = {name: found[name].to(t.dtype) for name, t in tree.items(form)}
    return found


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, t in tensors.items():
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise Refused(f"{name} has values that are not finite")


def checksum(*parts: bytes | memoryview | str) -> str:
    """SHA-256 of all parts, each with its length, in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(LENGTH, "little"))
        digest.update(content)
    return digest.hexdigest()
