"""Tests whether a method's server is linear in the models, so that it can work on encrypted ones.

A tiny federation runs one round. Every server function is then called with small and large random weights: weights in
its output must be the linear combination of its coefficients, and nothing else may depend on them. A client is sent
weights that are off in the eighth digit, as decrypted ones are: its answer must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model, make_model
from coterie.privacy.linear import Axes, WeightField, coefficients, columns, stand_in

SIZES = (1.0, 1e3)  # of random weights; clipping at some norm is not linear
ERROR, EFFECT = 1e-7, 1e-4  # of decrypted weights, and the largest effect that is accepted


class WeightParts(NamedTuple):
    """The fields of a method's server and messages that hold weights."""

    server: dict[str, bool]  # name -> whether it has one row per model
    up: tuple[str, ...]
    down: tuple[str, ...]
    greet: tuple[str, ...]
    welcome: bool  # whether it holds weights


class TreeMessage(NamedTuple):
    """A dictionary of tensors as a message with one field."""

    tensors: tree.Tree


class Refusal(Exception):
    """Why a method cannot be encrypted."""


def examine(method: AnyMethod) -> WeightParts:
    """The fields of this method that hold weights. Raises `CoterieError` if its server is not linear in them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # too small for several
    try:
        parts, with_statistics = (Examination(method, tiny_model(batch_norm)).parts() for batch_norm in (False, True))
        if parts != with_statistics:
            raise Refusal("its server treats BatchNorm's statistics differently from weights")
        return parts
    except Refusal as refusal:
        raise CoterieError(f"{method.title} cannot be encrypted: {refusal}") from None
    finally:
        torch.set_num_threads(threads)


class Examination:
    def __init__(self, method: AnyMethod, model: Model) -> None:
        self.method, self.model, self.samples = method, model, tiny_samples()
        counts = torch.stack([data.counts.long() for data in self.samples])
        self.server = method.server_init(self.model, Census(counts.sum(1), counts))
        self.clients = torch.tensor([0, 2])  # not all take part
        self.ups = tree.stack([self.answer(client) for client in self.clients])
        sent = {name: value for name, value in fields(self.ups) if are_weights(value)}
        self.shapes = [shapes(value, 1) for value in sent.values()]  # of the models that clients send
        self.uploaded = {name: WeightField(value, (len(self.clients),)) for name, value in sent.items()}
        self.kept = self.places(self.server)

    def answer(self, client: Tensor, error: float = 0.0) -> Any:
        data, down = self.samples[int(client)], self.method.server_send(self.server, client)
        if error:
            noise = randomly(down, self.places(down), torch.Generator().manual_seed(0), error)
            changed = {n: tree.apply(torch.add, getattr(down, n), getattr(noise, n)) for n in self.places(down)}
            down = down._replace(**changed)
        state = self.method.client_init(self.model, data, self.method.server_welcome(self.server))
        return self.method.client_train(self.model, state, down, data)[1]

    def parts(self) -> WeightParts:
        if self.method.trains_on_server:
            raise Refusal("its server trains on what clients send, so it must read it")
        if not tree.leaves(self.ups):
            raise Refusal("its clients send nothing")
        if not self.uploaded:
            raise Refusal("its clients send no weights, only statistics, which stay readable")
        method, one = self.method, torch.tensor(1)
        exact, off = self.answer(one), self.answer(one, ERROR)
        for name, value in fields(exact):
            if not close_to(value, getattr(off, name), EFFECT):
                raise Refusal(
                    f"its clients' `{name}` depend on the eighth digit of weights, which decryption does not preserve"
                )
        self.check(lambda server, ups: method.server_receive(server, self.clients, ups))
        down = self.check(lambda server, ups: method.server_send(server, one))
        greet = self.check(lambda server, ups: method.server_greet(server))
        welcome = self.check(lambda server, ups: TreeMessage(method.server_welcome(server)))
        if self.check(lambda server, ups: TreeMessage(method.server_report(server))):
            raise Refusal("its server reports weights")
        kept = {name: bool(place.axes) for name, place in self.kept.items()}
        return WeightParts(kept, tuple(self.uploaded), down, greet, bool(welcome))

    def places(self, message: Any) -> dict[str, WeightField]:
        """Fields that hold weights of the shapes that clients send, or several of them."""
        found = {name: (value, self.axes(value)) for name, value in fields(message)}
        return {name: WeightField(value, axes) for name, (value, axes) in found.items() if axes is not None}

    def axes(self, value: Any) -> Axes | None:
        if not are_weights(value):
            return None
        if shapes(value) in self.shapes:
            return ()
        return tuple(tree.leaves(value)[0].shape[:1]) if shapes(value, 1) in self.shapes else None

    def check(self, step: Callable[[Any, Any], Any]) -> tuple[str, ...]:
        """The weight fields that a server function returns. Raises `Refusal` unless they are linear combinations."""
        kept = columns(self.kept)
        total = kept + columns(self.uploaded)
        names = tuple(self.places(step(self.server, self.ups)))
        try:
            combined = step(stand_in(self.server, self.kept, 0, total), stand_in(self.ups, self.uploaded, kept, total))
            tables = {name: coefficients(getattr(combined, name)) for name in names}
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, CoterieError):
            raise Refusal("its server does more with the clients' weights than add them") from None
        for seed, size in enumerate(SIZES):
            draw = torch.Generator().manual_seed(seed)
            server, ups = randomly(self.server, self.kept, draw, size), randomly(self.ups, self.uploaded, draw, size)
            models = rows(server, self.kept) + rows(ups, self.uploaded)
            for name, value in fields(step(server, ups)):
                expected = mixed(tables[name], models, value) if name in names else getattr(combined, name)
                if not close_to(expected, value, 1e-9 * size):
                    raise Refusal(
                        f"its server computes `{name}` from the clients' weights, but not as a linear combination"
                    )
        for name, table in tables.items():
            if any(len(set(line[:kept][line[:kept] != 0].tolist())) > 1 for line in table.view(-1, total)):
                raise Refusal(
                    f"its server multiplies its state for `{name}` by different factors in every round, and a "
                    "ciphertext can be multiplied only once"
                )
        return names


def fields(message: Any) -> list[tuple[str, Any]]:
    return [] if message is None else list(zip(message._fields, message, strict=True))


def are_weights(value: Any) -> bool:
    """Whether this field is a tree of floating-point tensors; masks are not weights."""
    leaves = [] if isinstance(value, Tensor) else tree.leaves(value)
    return bool(leaves) and all(t.is_floating_point() for t in leaves)


def shapes(weights: Any, axes: int = 0) -> dict[str, Axes]:
    return {name: tuple(t.shape[axes:]) for name, t in tree.items(weights)}


def randomly(message: Any, places: dict[str, WeightField], draw: torch.Generator, size: float) -> Any:
    def noise(t: Tensor) -> Tensor:
        return size * torch.randn(t.shape, generator=draw, dtype=t.dtype)

    return message._replace(**{name: tree.apply(noise, getattr(message, name)) for name in places})


def rows(message: Any, places: dict[str, WeightField]) -> list[tree.Tree]:
    """All models of a message, in the order of the columns."""
    found: list[tree.Tree] = []
    for name, place in places.items():
        value = tree.flatten(getattr(message, name))
        found += [tree.pick(value, row) for row in range(place.axes[0])] if place.axes else [value]
    return found


def mixed(table: Tensor, models: list[tree.Tree], like: Any) -> Any:
    """Linear combinations of models with coefficients (C,) or (R, C); () if their tensors differ."""
    used = table.view(-1, len(models)).any(0)  # (C,)
    chosen = [model for model, is_used in zip(models, used.tolist(), strict=True) if is_used]
    if any(model.keys() != chosen[0].keys() for model in chosen):
        return ()
    stacked = tree.stack(chosen) if chosen else {n: t[None, ...][:0] for n, t in tree.items(like)}
    return tree.fill(like, {n: torch.tensordot(table[..., used], t, dims=1) for n, t in stacked.items()})


def close_to(a: Any, b: Any, error: float) -> bool:
    ours, theirs = tree.flatten(a), tree.flatten(b)
    return shapes(ours) == shapes(theirs) and all(
        torch.allclose(ours[n].double(), theirs[n].double(), rtol=1e-9, atol=error) for n in ours
    )


def tiny_model(batch_norm: bool) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = [nn.BatchNorm2d(2)] if batch_norm else []
        encoder = (nn.Conv2d(1, 2, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(72, 3), nn.ReLU())
        network = nn.Sequential(*encoder, nn.Linear(3, 2))
    return make_model(network, (1, 8, 8), 2).to("cpu", torch.float64)


def tiny_samples() -> list[Data]:
    draw, rate = torch.Generator().manual_seed(0), torch.tensor(1e-3, dtype=torch.float64)  # stable

    def client(n: int) -> Data:
        x = torch.randint(0, 256, (n, 1, 8, 8), generator=draw, dtype=torch.uint8)
        return Data(x, torch.arange(n) % 2, random.derive(random.seed_key(0), n), rate, 2, Transform(), alone=True)

    return [client(n) for n in (4, 5, 6)]
