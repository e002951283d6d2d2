"""What server and devices must agree on, and the messages that follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model
from coterie.core.rehearsal import known_classes
from coterie.deploy.compression import compress, decompress
from coterie.deploy.global_model import completed, tensors_read
from coterie.deploy.messages import Message, Received, check_scores, settings, version
from coterie.deploy.wire import (
    PROTOCOL,
    Header,
    Refused,
    TensorSchema,
    check_finite,
    checksum,
    decode,
    encode,
    read_header,
)

NOTHING = TensorSchema(())
LOSSY = {"fp16": torch.float16, "bf16": torch.bfloat16}
REQUESTS = ("join", "train", "score", "score_global", "finish")
COMPRESS = ("none", "zstd", "fp16", "bf16", "fp16+zstd", "bf16+zstd")


class Templates(NamedTuple):
    """Trees with the names, shapes and types of the tensors in messages."""

    welcome: tree.Tree
    down: Any
    up: Any
    shared: frozenset[str]  # names in `down` that are the same for all clients
    server: Any
    read: frozenset[str]  # names in `server` that the global model consists of


@dataclass(frozen=True)
class Agreement:
    """What server and devices agree on; it encodes and validates their messages."""

    method: AnyMethod
    model: Model
    num_clients: int  # m
    shape: tuple[int, ...]  # of a raw sample
    dtype: torch.dtype
    splits: tuple[str, ...]  # that clients are evaluated on
    seed: int
    compress: str = "none"  # one of COMPRESS
    federation: str = ""  # id of the federation

    @cached_property
    def templates(self) -> Templates:
        """Obtained by a rehearsal with two black images."""
        method, model = self.method.rehearsed(), self.model
        counts = torch.ones(self.num_clients, known_classes(model), dtype=torch.int64)
        server = method.server_init(model, Census(torch.full((self.num_clients,), max(model.classes, 1)), counts))
        a, b = (method.server_send(server, torch.tensor(i)) for i in (0, min(1, self.num_clients - 1)))
        same = zip(tree.items(a), tree.leaves(b), strict=True)
        shared = frozenset(name for (name, t), other in same if t is other)
        x, y = torch.zeros(2, *self.shape, dtype=self.dtype), model.task.example(model.label)
        key, rate = random.seed_key(0), torch.ones((), dtype=model.mean.dtype)
        data = Data(x, y, key, rate, known_classes(model), Transform(), alone=True)
        welcome = method.server_welcome(server)
        _, up = method.client_train(model, method.client_init(model, data, welcome), a, data)
        return Templates(welcome, a, up, shared, server, tensors_read(method, model, server, x))

    @cached_property
    def start(self) -> TensorSchema:
        return TensorSchema.of(self.model.initial)

    @cached_property
    def welcome(self) -> TensorSchema:
        return TensorSchema.of(self.templates.welcome)

    @cached_property
    def shared(self) -> TensorSchema:
        return self._down(lambda name: name in self.templates.shared)

    @cached_property
    def own(self) -> TensorSchema:
        return self._down(lambda name: name not in self.templates.shared)

    @cached_property
    def global_model(self) -> TensorSchema:
        """What devices need to evaluate the global model; nothing if there is none, or if every client has it."""
        read = frozenset() if self.method.personal_is_global else self.templates.read
        return TensorSchema.of({n: t for n, t in tree.items(self.templates.server) if n in read}, self._lossy)

    @cached_property
    def scores(self) -> TensorSchema:
        return TensorSchema.of({split: torch.zeros(3, dtype=torch.float64) for split in self.splits})

    @cached_property
    def up(self) -> TensorSchema:
        return TensorSchema.of({"up": self.templates.up}, self._lossy)

    @cached_property
    def measured_up(self) -> TensorSchema:
        """An update together with the scores of the trained model."""
        return TensorSchema(tuple(sorted(self.up.entries + self.scores.entries, key=lambda e: (-e[1].itemsize, e[0]))))

    @property
    def max_request(self) -> int:
        """Upper bound on the bytes of a request."""
        return max(self.own.max_bytes, self.welcome.max_bytes, NOTHING.max_bytes)

    @property
    def max_shared(self) -> int:
        """Upper bound on the bytes of the shared part of a request."""
        return max(self.shared.max_bytes, self.global_model.max_bytes)

    @property
    def max_answer(self) -> int:
        """Upper bound on the bytes of an answer."""
        return max(self.measured_up.max_bytes, self.scores.max_bytes, NOTHING.max_bytes)

    @cached_property
    def digest(self) -> str:
        """Checksum of the whole agreement; both sides must compute the same one."""
        parts = (self.start, self.welcome, self.shared, self.own, self.up, self.scores, self.global_model)
        options = {"method": settings(self.method), "seed": self.seed, "clients": self.num_clients}
        preprocess = {name: t.tolist() for name, t in self.model.preprocess.state_dict().items()}
        network = f"{self.model.encoder}\n{self.model.head}\n{preprocess} {self.model.preprocess.axis}"
        content = json.dumps(options, default=str, sort_keys=True)
        return checksum(str(PROTOCOL), self.federation, content, network, *(schema.digest for schema in parts))

    def start_message(self) -> bytes:
        """The initial weights and buffers, sent once to every device that joins."""
        return encode(self._header("start"), self.model.initial, self.start)

    def shared_message(self, down: Any) -> bytes:
        return self._pack(encode(self._header("shared"), tree.flatten(down), self.shared))

    def global_message(self, server: Any) -> bytes:
        """The shared part of requests to evaluate the global model."""
        return self._pack(encode(self._header("shared"), tree.flatten(server), self.global_model))

    def request(self, header: Header, tensors: tree.Tree, shared: bytes = b"") -> Message:
        """Encode a request; `made` in its header becomes the version of the client's state after it."""
        schema = self.request_schema(header.kind)
        given = {**header._asdict(), "schema": self.digest, "federation": self.federation}
        given["shared"] = checksum(shared) if shared else ""
        given["made"] = version(Header(**given), encode(Header(**given), tensors, schema))
        return Message(self._pack(encode(Header(**given), tensors, schema)), shared, Header(**given))

    def answer(self, to: Header, tensors: tree.Tree) -> bytes:
        return self._pack(encode(self._header(to.kind, to)._replace(made=to.made), tensors, self.answer_schema(to)))

    def error(self, to: Header, reason: str) -> bytes:
        """An answer that reports an error."""
        return self._pack(encode(self._header("error", to)._replace(made=to.made, note=reason), {}, NOTHING))

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether all values are finite, also after rounding for the wire."""
        numbers = (t for t in tensors.values() if t.is_floating_point())
        return all(bool(t.to(self._lossy or t.dtype).isfinite().all()) for t in numbers)

    def answer_schema(self, to: Header) -> TensorSchema:
        """The tensors that an answer to this request must have."""
        if to.kind == "train":
            return self.measured_up if to.measure else self.up
        return self.scores if to.kind in ("score", "score_global") else NOTHING

    def request_schema(self, kind: str) -> TensorSchema:
        """The tensors of the client's own part of a request."""
        return {"join": self.welcome, "score_global": NOTHING}.get(kind, self.own)

    def header_of(self, own: bytes) -> Header:
        """Validate the header of a request (on a device)."""
        return self._request_header(self._unpack(own, self.max_request))[0]

    def open_request(self, own: bytes, shared: bytes) -> Received:
        """Validate and decode a request (on a device)."""
        own = self._unpack(own, self.max_request)
        header, schema = self._request_header(own)
        if header.shared != (checksum(shared) if shared else ""):
            raise Refused("the shared part is not the one that the request names")
        if header.made != version(header, own):
            raise Refused("the checksum of the request does not match its content")
        tensors = decode(own, schema, self.templates.welcome if header.kind == "join" else None)
        if header.kind == "join":
            return Received(header, tensors)
        together, template = (
            (self.global_model, self.templates.server)
            if header.kind == "score_global"
            else (self.shared, self.templates.down)
        )
        if together.entries:
            plain = self._unpack(shared, together.max_bytes)
            if read_header(plain, together).kind != "shared":
                raise Refused("the shared part is a message of another kind")
            tensors |= decode(plain, together)
        return Received(header, {n: tensors[n].to(t.dtype) for n, t in tree.items(template) if n in tensors})

    def open_answer(self, message: bytes, to: Header) -> Received:
        """Validate and decode the answer to this request (on the server). An error report is an answer, too."""
        message = self._unpack(message, self.max_answer)
        header, schema = self._first_match(message, self.answer_schema(to), NOTHING)
        self._check(header)
        if header.client != to.client:
            raise Refused(f"answer of client {header.client} to a request for client {to.client}")
        if header.round != to.round:
            raise Refused(f"answer of round {header.round + 1} in round {to.round + 1}")
        if header.kind != "error" and (header.kind != to.kind or schema is not self.answer_schema(to)):
            raise Refused(f"answer of kind '{header.kind}' to a request of kind '{to.kind}'")
        if (header.base, header.made) != (to.base, to.made):
            raise Refused("answer to an earlier request")
        expected = self._header(header.kind, to)._replace(made=to.made)
        if header != (expected._replace(note=header.note) if header.kind == "error" else expected):
            raise Refused("the header has fields that an answer must not set")
        if header.kind == "error":
            return Received(header, {})
        tensors = decode(message, schema)
        for split in tensors.keys() & set(self.splits):
            check_scores(split, tensors[split], self.model.task.metric.scale)
        check_finite({name: t for name, t in tensors.items() if name not in self.splits})
        return Received(header, tensors)

    def up_of(self, tensors: Mapping[str, Tensor]) -> Any:
        """The update of an answer, as the method's `Up`."""
        flat = {name: tensors[f"up.{name}"].to(t.dtype) for name, t in tree.items(self.templates.up)}
        return tree.fill(self.templates.up, flat)

    def server_of(self, tensors: tree.Tree) -> Any:
        """The server's state, as far as the global model needs it."""
        return completed(self.templates.server, tensors)

    def _down(self, chosen: Callable[[str], bool]) -> TensorSchema:
        return TensorSchema.of({n: t for n, t in tree.items(self.templates.down) if chosen(n)}, self._lossy)

    @property
    def _lossy(self) -> torch.dtype | None:
        return None if self.method.exact else LOSSY.get(self.compress.removesuffix("+zstd"))

    @property
    def _zstd(self) -> bool:
        return self.compress.endswith("zstd")

    def _pack(self, message: bytes) -> bytes:
        return compress(message) if self._zstd else message

    def _unpack(self, message: bytes, max_bytes: int) -> bytes:
        return decompress(message, max_bytes) if self._zstd else message

    def _header(self, kind: str, to: Header | None = None) -> Header:
        """to: the request that is answered."""
        header = Header(kind, self.federation, self.digest)
        return header if to is None else header._replace(client=to.client, round=to.round, base=to.base)

    def _request_header(self, own: bytes) -> tuple[Header, TensorSchema]:
        header, schema = self._first_match(own, self.own, self.welcome, NOTHING)
        self._check(header)
        if header.kind not in REQUESTS or (header.kind == "score_global" and not self.global_model.entries):
            raise Refused(f"'{header.kind}' is not a kind of request in this federation")
        expected = self.request_schema(header.kind)
        if expected.table != schema.table:
            raise Refused(f"the tensors are not those of a '{header.kind}' request")
        return header, expected

    def _first_match(self, message: bytes, *schemas: TensorSchema) -> tuple[Header, TensorSchema]:
        """The header, and the first of these schemas that the message has. An error is that of the first schema."""
        reasons = []
        for schema in schemas:
            try:
                return read_header(message, schema), schema
            except Refused as refused:
                reasons.append(refused)
        raise reasons[0]

    def _check(self, header: Header) -> None:
        if header.federation != self.federation:
            raise Refused("message of another federation")
        if header.schema != self.digest:
            raise Refused("method, model or settings are not those of this federation")
