"""Homomorphic encryption: the server adds weights that only clients can read, as in appendix A.6 of FedPAC.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023.
Models are encrypted by CKKS (Cheon, Kim, Kim, Song, ASIACRYPT 2017); statistics, counts and choices stay readable, and
the method's own code computes the coefficients of the sums from them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model
from coterie.core.tree import Tree
from coterie.core.validation import check_fields
from coterie.core.wrapper import Around
from coterie.privacy import ckks
from coterie.privacy.examine import WeightParts, examine
from coterie.privacy.keys import CkksKeys, load_public, load_secret, new_keys
from coterie.privacy.linear import coefficients, columns, stand_in
from coterie.privacy.sealed import (
    WELCOME,
    Sealed,
    SealedModel,
    flat,
    outline,
    places,
    rows,
    sealed_fields,
    sealed_welcome,
    unchanged,
    with_leaves,
)

log = logging.getLogger("coterie")
SCHEMES = ("ckks",)
ONE = torch.ones((), dtype=torch.float64)


@dataclass(frozen=True)
class Encrypted(Around):
    """Wraps a method: its messages and its server hold `Sealed` instead of weights."""

    keys: CkksKeys = field(kw_only=True, repr=False)
    parts: WeightParts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stackable", False)
        object.__setattr__(self, "exact", True)
        object.__setattr__(self, "parts", examine(self.inner))

    def inside(self, server: Any) -> Any:
        """Decrypted in a simulation; unchanged on a server without the secret key."""
        return self.reveal(server) if self.keys.secret else server

    def opened(self, down: Any) -> Any:
        return self.reveal(down)

    def rehearsed(self) -> AnyMethod:
        """With throw-away keys: messages of the same form, on a side without the secret key."""
        return replace(self, keys=new_keys())

    # The server: sums of ciphertexts, with the coefficients of the inner method.

    def server_init(self, model: Model, census: Census) -> Any:
        """Encrypt the initial state, which the server knows, so that it has the form of all later states."""
        server = self.inner.server_init(model, census)
        start = {
            name: self._known(value, self.parts.server[name]) for name, value in with_leaves(server, self.parts.server)
        }
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
        stand_ins = stand_in(ups, places(ups), kept, total)
        received = self.inner.server_receive(self._stand_in(server, total), clients, stand_ins)
        models = rows(server) + rows(ups, [f"from client {i}" for i in clients.tolist()])
        return self._sums(received, self.parts.server, models)

    def server_predict(self, model: Model, server: Any, x: Tensor) -> None:
        """The server cannot read the global model."""

    def server_report(self, server: Any) -> Tree:
        return self.inner.server_report(self._stand_in(server))

    def _stand_in(self, server: Any, total: int | None = None) -> Any:
        return stand_in(server, places(server), 0, columns(places(server)) if total is None else total)

    def _sums(self, made: Any, names: Iterable[str], models: Sequence[SealedModel]) -> Any:
        return made._replace(**{name: self._sum(value, models) for name, value in with_leaves(made, names)})

    def _sum(self, weights: Any, models: Sequence[SealedModel]) -> Sealed:
        """weights: what the inner method computed from the stand-ins of these models."""
        table = coefficients(weights)  # (C,) or (R, C)
        axes, lines = table.shape[:-1], table.view(-1, len(models))  # (R, C)
        used = {j: models[j] for j in lines.any(0).nonzero()[:, 0].tolist()}
        if not used:
            raise CoterieError("nothing to add: all coefficients of the sum are zero")
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
        """Encrypt with the public key; rows that are all equal are encrypted once."""
        if not several:
            return self._sealed(outline(weights), ckks.encrypt_known(self.keys, flat(weights)), ONE)
        first, count = tree.pick(weights, 0), len(tree.leaves(weights)[0])
        if all(bool((t == t[:1]).all()) for t in tree.leaves(weights)):
            return tree.apply(lambda t: t.expand(count, *t.shape), self._known(first, several=False))
        return tree.stack([self._known(tree.pick(weights, row), several=False) for row in range(count)])

    # A client: the inner method between decryption and encryption.

    def client_init(self, model: Model, data: Data, welcome: Tree) -> Any:
        if self.parts.welcome:
            welcome = tree.flatten(self._open(sealed_welcome(welcome)))
        return self.inner.client_init(model, data, welcome)

    def client_train(self, model: Model, state: Any, down: Any, data: Data) -> tuple[Any, Any]:
        state, up = self.inner.client_train(model, state, self.reveal(down), data)
        return state, up._replace(**{name: self._seal(value) for name, value in with_leaves(up, self.parts.up)})

    def client_finish(self, model: Model, state: Any, down: Any, data: Data) -> Any:
        return self.inner.client_finish(model, state, self.reveal(down), data)

    def client_predict(self, model: Model, state: Any, down: Any, x: Tensor) -> Tensor:
        return self.inner.client_predict(model, state, self.reveal(down), x)

    def reveal(self, message: Any) -> Any:
        """Decrypt a message or the state of the server. Needs the secret key."""
        return message._replace(**{name: self._open(sealed) for name, sealed in sealed_fields(message)})

    def _seal(self, weights: Any) -> Sealed:
        values = flat(weights)
        sound = bool(values.isfinite().all()) and float(values.abs().max()) <= ckks.LIMIT
        if not sound:
            log.warning("a client is left out: its weights are not finite, or exceed %g", ckks.LIMIT)
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
        """On the device of the weights."""
        where = tree.leaves(outline)[0].device
        key = torch.tensor(self.keys.fingerprint).expand(factor.shape)
        return Sealed(outline, ciphertexts.to(where), factor.to(where), key.to(where))

    def _check(self, sealed: Sealed, whose: str) -> None:
        if (sealed.key != self.keys.fingerprint).any():
            raise CoterieError(f"weights {whose} are encrypted with other keys")


@dataclass(frozen=True)
class Encryption:
    """Encryption of the weights that clients send."""

    encrypt: str | None = field(
        default=None, metadata={"help": "ckks: the server adds weights without reading them; slower, more traffic"}
    )
    keys: str | None = field(
        default=None, metadata={"help": "folder of keys (`coterie keys`) to encrypt with; default: made for the run"}
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if self.encrypt not in (None, *SCHEMES):
            raise unknown("encryption", self.encrypt, SCHEMES)
        if self.keys and not self.encrypt:
            raise CoterieError("--keys requires --encrypt ckks")

    def around(self, method: AnyMethod) -> AnyMethod:
        """Wrap a method for a simulation, which has both keys."""
        if not self.encrypt:
            return method
        return Encrypted(inner=method, keys=load_secret(self.keys) if self.keys else new_keys())

    def on_server(self, method: AnyMethod) -> AnyMethod:
        """Wrap a method for a server, which has the public key only."""
        if not self.encrypt:
            return method
        if not self.keys:
            raise CoterieError(
                "the server needs the clients' public key: run `coterie keys FOLDER`, then pass --keys FOLDER"
            )
        return Encrypted(inner=method, keys=load_public(self.keys))

    def about(self, method: AnyMethod) -> dict[str, Any]:
        """For config.json: the scheme, and the fingerprint of keys that outlive the run."""
        if not isinstance(method, Encrypted):
            return {}
        key = f"{method.keys.fingerprint:016x}" if self.keys else None
        return {"encryption": {"encrypt": self.encrypt, "key": key}}
