"""Differential privacy of whole clients: their moves are clipped, and the server adds noise to the mean.

Dropped into the inner method's server is not what clients sent but S equal rows, the noisy mean of all: whatever the
method does with them, its state and all that it sends reveal no more than that mean. All clients count the same, and
the server is not told how many samples they have.

The mean is Σ clip(Δ_i) / S + N(0, (zC/S)²), S clients being asked whether or not they answer. Neighbours are two
federations in which one client's moves are there, or are all zero: the sum differs by at most C, so a round in which
the client takes part is one Gaussian mechanism of multiplier z. Who takes part is drawn without looking at the data and
is taken to be known, so a client pays for the rounds that it takes part in, without amplification by sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import order
from coterie.core.around import Around
from coterie.core.method import Census
from coterie.core.model import Model
from coterie.core.tree import Tree
from coterie.protection.updates import SIZES, moved, moves, norms, scaled, sent, shrink


class Noisy(NamedTuple):
    server: Any  # the inner method's
    key: Tensor  # () randomness of the next noise


@dataclass(frozen=True)
class ClientNoise(Around):
    bound: float = field(kw_only=True)  # C
    noise: float = field(kw_only=True)  # z
    joining: int = field(kw_only=True)  # S
    seed: int = field(kw_only=True)

    def inside(self, server: Noisy) -> Any:
        return server.server

    def server_init(self, model: Model, census: Census) -> Noisy:
        blank = Census(torch.ones_like(census.samples), torch.zeros_like(census.class_counts))
        key = order.fold(order.seed_key(~self.seed), order.NOISE)  # ~: no client draws from this stream
        return Noisy(self.inner.server_init(model, blank), key.to(model.mean.device))

    def server_receive(self, server: Noisy, clients: Tensor, ups: Any) -> Noisy:
        downs = sent(self.inner, server.server, clients)
        found = moves(ups, downs)
        weights = {name: t for part, own in found.items() if part not in SIZES for name, t in own.items()}
        short = scaled(weights, shrink(norms(weights), self.bound)) if weights else {}
        alike = {}
        for number, (name, t) in enumerate(short.items()):
            noise = self.noise * self.bound * order.normal(order.fold(server.key, order.DRAW, number), t[0])
            alike[name] = ((t.sum(0) + noise) / self.joining).expand_as(t)
        alike |= {name: torch.ones_like(t) for part in SIZES & found.keys() for name, t in found[part].items()}
        after = self.inner.server_receive(server.server, clients, moved(ups, downs, alike))
        return Noisy(after, order.fold(server.key, order.NOISE))

    def server_welcome(self, server: Noisy) -> Tree:
        return self.inner.server_welcome(server.server)

    def server_send(self, server: Noisy, client: Tensor) -> Any:
        return self.inner.server_send(server.server, client)

    def server_greet(self, server: Noisy) -> Any:
        return self.inner.server_greet(server.server)

    def server_predict(self, model: Model, server: Noisy, x: Tensor) -> Tensor | None:
        return self.inner.server_predict(model, server.server, x)

    def server_report(self, server: Noisy) -> Tree:
        return self.inner.server_report(server.server)
