"""What server and clients say to each other, and what they must agree on before they do.

The server writes letters (join, train, score, finish), a client answers each. What a client remembers has a version:
the checksum of all letters that led to it. A letter names the version it starts from, an answer the one it made, so
a letter that comes twice, late, or after a restart needs no case of its own: whoever has the version can go on from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import order, tree
from coterie.core.around import Around
from coterie.core.local import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model
from coterie.core.samples import Transform
from coterie.network.squeeze import expand, squeeze
from coterie.network.wire import (
    PROTOCOL,
    Header,
    Refused,
    Schema,
    body,
    check_finite,
    checksum,
    peek,
    seal,
    text,
    unseal,
)

AnyMethod = Method[Any, Any, Any, Any]
LOST = "what it remembered is not there any more"
NOTHING = Schema(())
SECRETS = ("seed", "secret", "keys")  # fields of those around a method
LOSSY = {"fp16": torch.float16, "bf16": torch.bfloat16}
COMPRESS = ("none", "zstd", "fp16", "bf16", "fp16+zstd", "bf16+zstd")


class Forms(NamedTuple):
    """Trees whose names, shapes and types the messages have."""

    welcome: tree.Tree
    down: Any
    up: Any
    shared: frozenset[str]  # names in `down` of what all clients are sent alike


class Letter(NamedTuple):
    """What a client is sent: its own part, and the part that all are sent alike."""

    own: bytes
    shared: bytes
    header: Header


class Said(NamedTuple):
    """A letter or an answer that was let in."""

    header: Header
    tensors: tree.Tree


@dataclass(frozen=True)
class Agreement:
    """All that server and devices must agree on, and the messages that follow from it."""

    method: AnyMethod
    model: Model
    clients: int  # m
    shape: tuple[int, ...]  # of a raw sample
    dtype: torch.dtype
    splits: tuple[str, ...]  # that clients can be measured on
    seed: int
    compress: str = "none"  # how messages travel, one of COMPRESS
    federation: str = ""  # which one

    @cached_property
    def forms(self) -> Forms:
        """Those of a client with two black images."""
        method, model = self.method.rehearsed(), self.model
        counts = torch.ones(self.clients, model.classes, dtype=torch.int64)
        server = method.server_init(model, Census(counts.sum(1), counts))
        a, b = (method.server_send(server, torch.tensor(i)) for i in (0, min(1, self.clients - 1)))
        same = zip(tree.items(a), tree.leaves(b), strict=True)
        shared = frozenset(name for (name, t), other in same if t is other)
        x, y = torch.zeros(2, *self.shape, dtype=self.dtype), torch.tensor([0, model.classes - 1])
        key, rate = order.seed_key(0), torch.ones((), dtype=model.mean.dtype)
        data = Data(x, y, key, rate, model.classes, Transform(), alone=True)
        welcome = method.server_welcome(server)
        _, up = method.client_train(model, method.client_init(model, data, welcome), a, data)
        return Forms(welcome, a, up, shared)

    @cached_property
    def start(self) -> Schema:
        return Schema.of(self.model.start)

    @cached_property
    def welcome(self) -> Schema:
        return Schema.of(self.forms.welcome)

    @cached_property
    def shared(self) -> Schema:
        return self._down(lambda name: name in self.forms.shared)

    @cached_property
    def own(self) -> Schema:
        return self._down(lambda name: name not in self.forms.shared)

    @cached_property
    def scores(self) -> Schema:
        return Schema.of({split: torch.zeros(3, dtype=torch.float64) for split in self.splits})

    @cached_property
    def up(self) -> Schema:
        return Schema.of({"up": self.forms.up}, self._lossy)

    @cached_property
    def measured_up(self) -> Schema:
        return Schema(tuple(sorted(self.up.entries + self.scores.entries, key=lambda e: (-e[1].itemsize, e[0]))))

    @property
    def most_letter(self) -> int:
        """Bytes of the longest letter."""
        return max(self.own.most, self.welcome.most)

    @property
    def most_answer(self) -> int:
        return max(self.measured_up.most, self.scores.most, NOTHING.most)

    @cached_property
    def digest(self) -> str:
        """Of everything that is said here."""
        parts = (self.start, self.welcome, self.shared, self.own, self.up, self.scores)
        told = {"method": settings(self.method), "seed": self.seed, "clients": self.clients}
        network = f"{self.model.encoder}\n{self.model.head}\n{self.model.mean.tolist()} {self.model.std.tolist()}"
        content = json.dumps(told, default=str, sort_keys=True)
        return checksum(str(PROTOCOL), self.federation, content, network, *(schema.digest for schema in parts))

    def start_message(self) -> bytes:
        """The weights that everybody starts from."""
        return seal(self._header("start"), tree.flatten(self.model.start), self.start)

    def shared_message(self, down: Any) -> bytes:
        return self._pack(seal(self._header("shared"), tree.flatten(down), self.shared))

    def letter(self, header: Header, tensors: tree.Tree, shared: bytes = b"") -> Letter:
        """A letter. What it makes is the version of what the client remembers then, if it is to change that."""
        schema = self.welcome if header.kind == "join" else self.own
        given = {**header._asdict(), "schema": self.digest, "federation": self.federation}
        given["shared"] = checksum(shared) if shared else ""
        given["made"] = version(Header(**given), seal(Header(**given), tensors, schema))
        return Letter(self._pack(seal(Header(**given), tensors, schema)), shared, Header(**given))

    def answer(self, to: Header, tensors: tree.Tree) -> bytes:
        return self._pack(seal(self._header(to.kind, to)._replace(made=to.made), tensors, self.answer_schema(to)))

    def trouble(self, to: Header, reason: str) -> bytes:
        return self._pack(seal(self._header("trouble", to)._replace(made=to.made, note=reason), {}, NOTHING))

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether all numbers are finite, also as they travel."""
        numbers = (t for t in tensors.values() if t.is_floating_point())
        return all(bool(t.to(self._lossy or t.dtype).isfinite().all()) for t in numbers)

    def answer_schema(self, to: Header) -> Schema:
        """What an answer to this letter must have."""
        if to.kind == "train":
            return self.measured_up if to.measure else self.up
        return self.scores if to.kind == "score" else NOTHING

    def header_of(self, own: bytes) -> Header:
        """Of a letter, on the client's side."""
        return self._which(self._unpack(own, self.most_letter))[0]

    def open_letter(self, own: bytes, shared: bytes) -> Said:
        """On the client's side: a letter, checked."""
        own = self._unpack(own, self.most_letter)
        header, schema = self._which(own)
        if header.shared != (checksum(shared) if shared else ""):
            raise Refused("the part that all are sent alike is not the one that the letter names")
        if header.made != version(header, own):
            raise Refused("it is not what it says it is")
        tensors = unseal(own, schema, self.forms.welcome if header.kind == "join" else None)
        if header.kind == "join":
            return Said(header, tensors)
        if self.shared.entries:
            plain = self._unpack(shared, self.shared.most)
            if peek(plain, self.shared).kind != "shared":
                raise Refused("the part that all are sent alike is something else")
            tensors |= unseal(plain, self.shared)
        return Said(header, {name: tensors[name].to(t.dtype) for name, t in tree.items(self.forms.down)})

    def open_answer(self, message: bytes, to: Header) -> Said:
        """On the server's side: the answer to this letter, checked. A client's trouble is an answer too."""
        message = self._unpack(message, self.most_answer)
        header, schema = self._first(message, self.answer_schema(to), NOTHING)
        self._check(header)
        if header.client != to.client:
            raise Refused(f"it is of client {header.client}, and client {to.client} was asked")
        if header.round != to.round:
            raise Refused(f"it is of round {header.round + 1}, and this is round {to.round + 1}")
        if header.kind != "trouble" and (header.kind != to.kind or schema is not self.answer_schema(to)):
            raise Refused(f"it answers to '{header.kind}', and was asked to {to.kind}")
        if (header.base, header.made) != (to.base, to.made):
            raise Refused("it answers to another letter than the last one")
        said = self._header(header.kind, to)._replace(made=to.made)
        if header != (said._replace(note=header.note) if header.kind == "trouble" else said):
            raise Refused("its header says what an answer does not say")
        if header.kind == "trouble":
            return Said(header, {})
        tensors = unseal(message, schema)
        for split in tensors.keys() & set(self.splits):
            check_counts(split, tensors[split])
        check_finite({name: t for name, t in tensors.items() if name not in self.splits})
        return Said(header, tensors)

    def up_of(self, tensors: Mapping[str, Tensor]) -> Any:
        form = {name: tensors[f"up.{name}"].to(t.dtype) for name, t in tree.items(self.forms.up)}
        return tree.fill(self.forms.up, form)

    def _down(self, chosen: Any) -> Schema:
        return Schema.of({n: t for n, t in tree.items(self.forms.down) if chosen(n)}, self._lossy)

    @property
    def _lossy(self) -> torch.dtype | None:
        return None if self.method.exact else LOSSY.get(self.compress.removesuffix("+zstd"))

    @property
    def _squeezed(self) -> bool:
        return self.compress.endswith("zstd")

    def _pack(self, message: bytes) -> bytes:
        return squeeze(message) if self._squeezed else message

    def _unpack(self, message: bytes, most: int) -> bytes:
        return expand(message, most) if self._squeezed else message

    def _header(self, kind: str, to: Header | None = None) -> Header:
        """to: the letter that is answered."""
        header = Header(kind, self.federation, self.digest)
        return header if to is None else header._replace(client=to.client, round=to.round, base=to.base)

    def _which(self, own: bytes) -> tuple[Header, Schema]:
        header, schema = self._first(own, self.own, self.welcome)
        self._check(header)
        if header.kind not in ("join", "train", "score", "finish"):
            raise Refused(f"'{header.kind}' is nothing that clients are sent")
        wanted = self.welcome if header.kind == "join" else self.own
        if wanted.table != schema.table:
            raise Refused(f"its tensors are not those of '{header.kind}'")
        return header, wanted

    def _first(self, message: bytes, *schemas: Schema) -> tuple[Header, Schema]:
        """By the first of these forms that it has."""
        for schema in schemas[:-1]:
            try:
                return peek(message, schema), schema
            except Refused as refused:
                reason = refused
        try:
            return peek(message, schemas[-1]), schemas[-1]
        except Refused:
            raise reason from None

    def _check(self, header: Header) -> None:
        if header.federation != self.federation:
            raise Refused("it belongs to another federation")
        if header.schema != self.digest:
            raise Refused("method, model or settings are not those of this federation")


def version(header: Header, own: bytes) -> str:
    """Of what a client remembers after this letter; where it remembers nothing new, a name for the letter."""
    return checksum(*map(text, header._replace(made="")), body(own))


def check_counts(split: str, scores: Tensor) -> None:
    """Samples that are right, and how many there are. The loss of a bad model may be infinite."""
    right, total, _ = scores.tolist()
    if not 0 <= right <= total < math.inf:
        raise Refused(f"its scores on {split} cannot be: {right:g} right of {total:g}")


def settings(method: AnyMethod) -> dict[str, Any]:
    """Of a method and of those that it is around; nothing that only one side knows."""
    plain = {f.name: getattr(method, f.name) for f in fields(method) if f.name not in SECRETS}
    found: dict[str, Any] = {n: v for n, v in plain.items() if isinstance(v, int | float | str | tuple | None)}
    found |= {"kind": type(method).__name__, "train": asdict(method.train)}
    return found | {"inner": settings(method.inner)} if isinstance(method, Around) else found
