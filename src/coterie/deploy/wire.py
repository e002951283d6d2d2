"""Encoding, decoding and validation of messages.

A message is a safetensors file: a table of tensor names, types, shapes and offsets, a header of string fields, and the
values. Both sides know which table to expect, so a message is decoded only if its table matches byte for byte, and
nothing is allocated otherwise. There is no pickle.
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
from coterie.core.printable import printable

PROTOCOL = 4  # version of all messages between server and devices
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
MAX_HEADER = 4096  # bytes of the header fields
MAX_NOTE = 500  # characters of a header field
LENGTH = 8  # bytes that encode the length of table and header
KINDS = ("start", "shared", "join", "train", "score", "score_global", "finish", "error")
HEX = re.compile(r"[0-9a-f]{0,64}")
INTEGER = re.compile(r"-?[0-9]{1,9}")


class Refused(Exception):
    """A message is invalid; the text is logged and sent back to its sender."""


class InvalidAnswer(Refused):
    """The expected answer arrived, but its content is invalid; the client will not send another one."""


class Header(NamedTuple):
    """The metadata of a message."""

    kind: str  # one of KINDS
    federation: str = ""  # its id, in hexadecimal
    schema: str = ""  # digest of the agreement between server and devices
    client: int = -1
    round: int = -1
    rate: float = 1.0  # factor on the learning rate
    base: str = ""  # version of the client's state before the request
    made: str = ""  # and after it
    shared: str = ""  # checksum of the part that is the same for all clients
    measure: int = 0  # 1: evaluate the model after training
    note: str = ""  # text of an error


@dataclass(frozen=True)
class TensorSchema:
    """Names, types and shapes of the tensors in a message."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # in the order of the bytes

    @staticmethod
    def of(template: object, lossy: torch.dtype | None = None) -> TensorSchema:
        """The schema of a tree of tensors. lossy: the type that floating-point values are rounded to."""
        listed = [(name, t.dtype, tuple(t.shape)) for name, t in tree.items(template)]
        if lossy is not None:
            listed = [(n, lossy if d in (torch.float32, torch.float64) else d, s) for n, d, s in listed]
        return TensorSchema(
            tuple(sorted(listed, key=lambda entry: (-entry[1].itemsize, entry[0])))
        )  # keeps values aligned

    @cached_property
    def table(self) -> bytes:
        """The bytes before the header fields."""
        table, at = dict[str, Any](), 0
        for name, dtype, shape in self.entries:
            end = at + math.prod(shape) * dtype.itemsize
            table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(table, separators=(",", ":"))[:-1]
        return f'{text}{"," if table else ""}"__metadata__":'.encode()

    @cached_property
    def size(self) -> int:
        """Bytes of the values."""
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.entries)

    @property
    def max_bytes(self) -> int:
        """Upper bound on the size of a message, including one that zstd made longer."""
        return LENGTH + len(self.table) + MAX_HEADER + self.size + self.size // 128

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.table).hexdigest()


def encode(header: Header, tensors: Mapping[str, Tensor], schema: TensorSchema) -> bytes:
    """Encode a message."""
    top = schema.table + encode_fields({name: text(value) for name, value in header._asdict().items()})
    top += b" " * (-len(top) % 8)
    parts = [raw(tensors[name], dtype, shape) for name, dtype, shape in schema.entries]
    return b"".join([len(top).to_bytes(LENGTH, "little"), top, *parts])


def encode_fields(words: dict[str, str]) -> bytes:
    return json.dumps(words, separators=(",", ":")).encode() + b"}"


def text(value: object) -> str:
    return value[:MAX_NOTE] if isinstance(value, str) else repr(value)


def raw(t: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    if tuple(t.shape) != shape:
        raise ValueError(f"expected a tensor of shape {shape}, got {tuple(t.shape)}")
    return t.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def body(message: bytes) -> memoryview:
    """The values of a validated message."""
    return memoryview(message)[LENGTH + int.from_bytes(message[:LENGTH], "little") :]


def read_header(message: bytes, schema: TensorSchema) -> Header:
    """Validate the size and the table of a message, and return its header."""
    if len(message) < LENGTH:
        raise Refused(f"too short for a message: {len(message)} bytes")
    length = int.from_bytes(message[:LENGTH], "little")
    if length > len(schema.table) + MAX_HEADER:
        raise Refused(f"the table has {length} bytes, more than the allowed {len(schema.table) + MAX_HEADER}")
    if len(message) != LENGTH + length + schema.size:
        wanted = LENGTH + length + schema.size
        raise Refused(f"expected {wanted} bytes, got {len(message)}: truncated, too long, or for another model")
    top = message[LENGTH : LENGTH + length]
    if not top.startswith(schema.table):
        raise Refused("tensor names, shapes or types do not match this federation")
    return decode_fields(top[len(schema.table) :])


def decode_fields(content: bytes) -> Header:
    """Only the canonical encoding of `encode_fields` is accepted: no duplicate keys, no hidden content."""
    try:
        words = json.loads(content.rstrip(b" ")[:-1])
    except (ValueError, RecursionError):
        raise Refused("the header is not valid JSON") from None
    if not isinstance(words, dict) or tuple(words) != Header._fields:
        raise Refused(f"the header does not have the fields of protocol {PROTOCOL}")
    if not all(isinstance(word, str) and len(word) <= MAX_NOTE for word in words.values()):
        raise Refused("a header field is not a string, or too long")
    if encode_fields(words) != content.rstrip(b" "):
        raise Refused("the header is not in canonical form")
    return typed(words)


def typed(words: dict[str, str]) -> Header:
    """Validate and convert each header field."""
    if words["kind"] not in KINDS:
        raise Refused("unknown kind of message")
    for name in ("federation", "schema", "base", "made", "shared"):
        if not HEX.fullmatch(words[name]):
            raise Refused(f"the header field '{name}' is not a checksum")
    for name in ("client", "round", "measure"):
        if not INTEGER.fullmatch(words[name]):
            raise Refused(f"the header field '{name}' is not an integer")
    try:
        rate = float(words["rate"])
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise Refused("the header field 'rate' is not a finite number of at least 0")
    whole = {name: int(words[name]) for name in ("client", "round", "measure")}
    return Header(**{**words, **whole, "rate": rate, "note": readable(words["note"])})  # type: ignore[arg-type]


def readable(text: str) -> str:
    """Remote text, truncated and escaped for one line of a log."""
    return printable(text[:MAX_NOTE])


def decode(message: bytes, schema: TensorSchema, template: object | None = None) -> tree.Tree:
    """The tensors of a message that `read_header` has validated, by dotted name, in newly allocated memory.

    template: a tree whose dtypes they are converted to.
    """
    numbers, at, found = np.frombuffer(body(message), np.uint8), 0, dict[str, Tensor]()
    for name, dtype, shape in schema.entries:
        t = torch.empty(shape, dtype=dtype)
        end = at + t.numel() * dtype.itemsize
        if dtype == torch.bool and t.numel() and int(numbers[at:end].max()) > 1:
            raise Refused(f"{name} has boolean values that are neither 0 nor 1")
        if t.numel():
            t.view(-1).view(torch.uint8).numpy()[:] = numbers[at:end]
        found[name], at = t, end
    if template is not None:
        found = {name: found[name].to(t.dtype) for name, t in tree.items(template)}
    return found


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, t in tensors.items():
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise InvalidAnswer(f"{name} has values that are not finite")


def checksum(*parts: bytes | memoryview | str) -> str:
    """SHA-256 of all parts, each preceded by its length, in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(LENGTH, "little"))
        digest.update(content)
    return digest.hexdigest()
