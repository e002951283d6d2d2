"""Weights that only clients can read: the server adds up ciphertexts, as in appendix A.6 of FedPAC.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023.
Models are encrypted by CKKS (Cheon, Kim, Kim, Song, ASIACRYPT 2017); statistics, counts and choices stay readable, and
the server takes from them the weights of its sums, by the method's own code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.around import Around
from coterie.core.errors import CoterieError, unknown
from coterie.core.local import Data
from coterie.core.method import Census
from coterie.core.model import Model
from coterie.core.tree import Tree
from coterie.protection import ckks
from coterie.protection.examine import AnyMethod, Parts, examine
from coterie.protection.keys import Keys, load_public, load_secret, new_keys
from coterie.protection.linear import Place, coefficients, columns, stand_in

log = logging.getLogger("coterie")
SCHEMES = ("ckks",)
WELCOME = "sealed"  # prefix of the names in a welcome that is encrypted


class Sealed(NamedTuple):
    """Weights that are encrypted; with a leading axis R, several of them."""

    outline: Any  # the tree of weights with no rows: (0, ...) tells each tensor's name, shape and type
    ciphertexts: Tensor  # (c, bytes) uint8
    factor: Tensor  # () what decrypted numbers are multiplied with; not a number where the weights were none
    key: Tensor  # () fingerprint of the keys

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(self.factor.shape)


@dataclass(frozen=True)
class Encrypted(Around):
    """The inner method; in the place of weights, its messages and its server have `Sealed`."""

    keys: Keys = field(kw_only=True, repr=False)
    parts: Parts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "batched", False)
        object.__setattr__(self, "exact", True)
        object.__setattr__(self, "parts", examine(self.inner))

    def inside(self, server: Any) -> Any:
        """In a simulation; a server that has not the secret cannot look inside."""
        return self.reveal(server) if self.keys.secret else server

    def opened(self, down: Any) -> Any:
        return self.reveal(down)

    def rehearsed(self) -> AnyMethod:
        """With keys that nobody has: messages have the same form, and a side without the secret can make them."""
        return replace(self, keys=new_keys())

    # The server: sums of ciphertexts, by coefficients that the inner method gives.

    def server_init(self, model: Model, census: Census) -> Any:
        """The start is known to the server; it is encrypted to have the form of all that follows."""
        server = self.inner.server_init(model, census)
        start = {name: self._known(value, self.parts.server[name]) for name, value in some(server, self.parts.server)}
        return server._replace(**start)

    def server_welcome(self, server: Any) -> Tree:
        welcome = self.inner.server_welcome(self._stand_in(server))
        return tree.flatten({WELCOME: self._sum(welcome, rows(server))}) if self.parts.welcome else welcome

    def server_send(self, server: Any, client: Tensor) -> Any:
        return self._sums(self.inner.server_send(self._stand_in(server), client), self.parts.down, rows(server))

    def server_greet(self, server: Any) -> Any:
        greeting = self.inner.server_greet(self._stand_in(server))
        return greeting if greeting is None else self._sums(greeting, self.parts.greet, rows(server))

    def server_receive(self, server: Any, clients: Tensor, ups: Any) -> Any:
        kept = columns(places(server))
        total = kept + columns(places(ups))
        told = stand_in(ups, places(ups), kept, total)
        received = self.inner.server_receive(self._stand_in(server, total), clients, told)
        models = rows(server) + rows(ups, [f"from client {i}" for i in clients.tolist()])
        return self._sums(received, self.parts.server, models)

    def server_predict(self, model: Model, server: Any, x: Tensor) -> None:
        """The server cannot read the global model."""

    def server_report(self, server: Any) -> Tree:
        return self.inner.server_report(self._stand_in(server))

    def _stand_in(self, server: Any, total: int | None = None) -> Any:
        return stand_in(server, places(server), 0, columns(places(server)) if total is None else total)

    def _sums(self, made: Any, names: Iterable[str], models: Sequence[Row]) -> Any:
        return made._replace(**{name: self._sum(value, models) for name, value in some(made, names)})

    def _sum(self, weights: Any, models: Sequence[Row]) -> Sealed:
        """weights: what the inner method made of the stand-ins of these models."""
        table = coefficients(weights)  # (C,) or (R, C)
        axes, lines = table.shape[:-1], table.view(-1, len(models))  # (R, C)
        used = {j: models[j] for j in lines.any(0).nonzero()[:, 0].tolist()}
        if not used:
            raise CoterieError("there is nothing to add up: all weights of the combination are zero")
        for model in used.values():
            self._check(model.sealed, model.whose)
        if (same := unchanged(lines, models)) is not None:
            return same._replace(outline=tree.fill(weights, tree.flatten(same.outline)))
        ciphertexts, factor = ckks.combine(self.keys, {j: model.term for j, model in used.items()}, lines)
        shapes = tree.fill(weights, tree.flatten(next(iter(used.values())).sealed.outline))
        return self._sealed(
            tree.apply(lambda t: t.expand(*axes, *t.shape), shapes),
            ciphertexts.view(*axes, *ciphertexts.shape[1:]),
            factor.view(axes),
        )

    def _known(self, weights: Any, several: bool) -> Sealed:
        """Encrypted by the public key. What all rows share is encrypted once."""
        if not several:
            return self._sealed(outline(weights), ckks.encrypt_known(self.keys, flat(weights)), ONE)
        first, count = tree.pick(weights, 0), len(tree.leaves(weights)[0])
        if all(bool((t == t[:1]).all()) for t in tree.leaves(weights)):
            return tree.apply(lambda t: t.expand(count, *t.shape), self._known(first, several=False))
        return tree.stack([self._known(tree.pick(weights, row), several=False) for row in range(count)])

    # A client: the inner method, between decryption and encryption.

    def client_init(self, model: Model, data: Data, welcome: Tree) -> Any:
        if self.parts.welcome:
            welcome = tree.flatten(self._open(sealed_welcome(welcome)))
        return self.inner.client_init(model, data, welcome)

    def client_train(self, model: Model, state: Any, down: Any, data: Data) -> tuple[Any, Any]:
        state, up = self.inner.client_train(model, state, self.reveal(down), data)
        return state, up._replace(**{name: self._seal(value) for name, value in some(up, self.parts.up)})

    def client_finish(self, model: Model, state: Any, down: Any, data: Data) -> Any:
        return self.inner.client_finish(model, state, self.reveal(down), data)

    def client_predict(self, model: Model, state: Any, down: Any, x: Tensor) -> Tensor:
        return self.inner.client_predict(model, state, self.reveal(down), x)

    def reveal(self, message: Any) -> Any:
        """A message, or the state of the server, as the inner method has it. Only those with the secret key can."""
        return message._replace(**{name: self._open(sealed) for name, sealed in sealed_fields(message)})

    def _seal(self, weights: Any) -> Sealed:
        values = flat(weights)
        sound = bool(values.isfinite().all()) and float(values.abs().max()) <= ckks.LIMIT
        if not sound:
            log.warning(
                "weights that are not finite, or beyond %g, are not encrypted; their client is left out", ckks.LIMIT
            )
        ciphertexts = ckks.encrypt(self.keys, values if sound else torch.zeros_like(values))
        return self._sealed(outline(weights), ciphertexts, ONE if sound else ONE * torch.nan)

    def _open(self, sealed: Sealed) -> Any:
        self._check(sealed, "from the server")
        axes = sealed.axes
        shapes = [t.shape[len(axes) + 1 :] for t in tree.leaves(sealed.outline)]
        values = ckks.decrypt(self.keys, sealed.ciphertexts, sum(shape.numel() for shape in shapes))
        values = values * sealed.factor.cpu()[..., None]  # (..., n)
        parts = iter(torch.split(values, [shape.numel() for shape in shapes], dim=-1))
        return tree.apply(lambda t: next(parts).reshape(*axes, *t.shape[len(axes) + 1 :]).to(t), sealed.outline)

    def _sealed(self, outline: Any, ciphertexts: Tensor, factor: Tensor) -> Sealed:
        """All of it where the weights are."""
        where = tree.leaves(outline)[0].device
        key = torch.tensor(self.keys.fingerprint).expand(factor.shape)
        return Sealed(outline, ciphertexts.to(where), factor.to(where), key.to(where))

    def _check(self, sealed: Sealed, whose: str) -> None:
        if (sealed.key != self.keys.fingerprint).any():
            raise CoterieError(f"weights {whose} are encrypted for other keys than those that are used here")


ONE = torch.ones((), dtype=torch.float64)


class Row(NamedTuple):
    """One encrypted model of a message."""

    field: Sealed
    row: int | None  # of it; None: it has none
    whose: str

    @property
    def sealed(self) -> Sealed:
        return self.field if self.row is None else tree.pick(self.field, self.row)

    @property
    def term(self) -> ckks.Term:
        sealed = self.sealed
        return ckks.Term(sealed.ciphertexts, float(sealed.factor), self.whose)


def some(message: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    """These of its fields, but for trees without tensors: a network may have an encoder without weights."""
    return [(name, value) for name in names if tree.leaves(value := getattr(message, name))]


def sealed_fields(message: Any) -> list[tuple[str, Sealed]]:
    return [(name, value) for name, value in zip(message._fields, message, strict=True) if isinstance(value, Sealed)]


def places(message: Any) -> dict[str, Place]:
    return {name: Place(sealed.outline, sealed.axes) for name, sealed in sealed_fields(message)}


def rows(message: Any, whose: Sequence[str] = ()) -> list[Row]:
    """All encrypted models of a message, in the order of the columns."""
    found: list[Row] = []
    for _, sealed in sealed_fields(message):
        numbers = range(len(sealed.factor)) if sealed.axes else [None]
        found += [Row(sealed, row, whose[row] if whose and row is not None else "of the server") for row in numbers]
    return found


def unchanged(lines: Tensor, models: Sequence[Row]) -> Sealed | None:
    """The field that these sums (R, C) are, row by row, if they are one: it is sent to all without a copy."""
    whole = (lines.count_nonzero(1) == 1) & (lines.amax(1) == 1)
    chosen = [models[j] for j in lines.argmax(1).tolist()]
    field = chosen[0].field
    complete = [model.row for model in chosen] == (list(range(len(field.factor))) if field.axes else [None])
    kept = field.ciphertexts.shape[-1] == ckks.SUM
    return field if bool(whole.all()) and complete and kept and all(m.field is field for m in chosen) else None


def outline(weights: Any) -> Any:
    return tree.apply(lambda t: t.new_empty(0, *t.shape), weights)


def flat(weights: Any) -> Tensor:
    """(n,) all numbers."""
    return torch.cat([t.detach().cpu().double().flatten() for t in tree.leaves(weights)])


def sealed_welcome(welcome: Tree) -> Sealed:
    """From what `flatten` made of it."""
    told = {name.removeprefix(f"{WELCOME}."): t for name, t in welcome.items()}
    shapes = {name.removeprefix("outline."): t for name, t in told.items() if name.startswith("outline.")}
    return Sealed(shapes, told["ciphertexts"], told["factor"], told["key"])


@dataclass(frozen=True)
class Encryption:
    """Whether the server can read weights."""

    encrypt: str | None = field(
        default=None, metadata={"help": "ckks: the server adds up weights that it cannot read; slower, more traffic"}
    )
    keys: str | None = field(
        default=None, metadata={"help": "folder of keys (`coterie keys`) to encrypt with; usually made for the run"}
    )

    def __post_init__(self) -> None:
        if self.encrypt not in (None, *SCHEMES):
            raise unknown("encryption", self.encrypt, SCHEMES)
        if self.keys and not self.encrypt:
            raise CoterieError("keys are for encryption; add --encrypt ckks")

    def around(self, method: AnyMethod) -> AnyMethod:
        """The method as it is asked for, in a process that is server and clients at once."""
        if not self.encrypt:
            return method
        return Encrypted(inner=method, keys=load_secret(self.keys) if self.keys else new_keys())

    def on_server(self, method: AnyMethod) -> AnyMethod:
        """The same where clients are elsewhere: the server has the public key only."""
        if not self.encrypt:
            return method
        if not self.keys:
            raise CoterieError(
                "a server needs the public key of its clients: `coterie keys FOLDER`, then --keys FOLDER"
            )
        return Encrypted(inner=method, keys=load_public(self.keys))

    def about(self, method: AnyMethod) -> dict[str, Any]:
        """For the configuration of a run: of its keys only which, and not even that if they end with the run."""
        if not isinstance(method, Encrypted):
            return {}
        key = f"{method.keys.fingerprint:016x}" if self.keys else None
        return {"encryption": {"encrypt": self.encrypt, "key": key}}
