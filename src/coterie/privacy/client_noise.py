"""Client-level differential privacy: updates are clipped, and the server adds noise to their mean.

The inner method's server receives S equal rows, the noisy mean of all clients, instead of their updates. Whatever it
computes from them, its state and its messages reveal no more than that mean. All clients have equal weight, and the
server does not learn their sample counts.

The mean is Σ clip(Δ_i) / S + N(0, (zC/S)²) over S participants, whether or not they answer. Neighbors are two
federations that differ in one client, whose updates are either present or all zero: the sum differs by at most C, so a
round in which the client takes part is one Gaussian mechanism of multiplier z. Participants are drawn independently of
the data and assumed to be public, so a client pays for the rounds it takes part in, without amplification by sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import random
from coterie.core.method import Census, messages
from coterie.core.model import Model
from coterie.core.tree import Tree
from coterie.core.wrapper import Around
from coterie.privacy.noise import Noise
from coterie.privacy.updates import SIZES, moved, moves, norms, scaled, shrink


class Noisy(NamedTuple):
    server: Any  # state of the inner method
    key: Tensor  # () of the next round's noise, if it is reproducible


@dataclass(frozen=True)
class ClientNoise(Around):
    bound: float = field(kw_only=True)  # C
    noise: float = field(kw_only=True)  # z
    joining: int = field(kw_only=True)  # S
    seed: int = field(kw_only=True)  # of reproducible noise
    source: Noise = field(kw_only=True)

    def inside(self, server: Noisy) -> Any:
        return server.server

    def server_init(self, model: Model, census: Census) -> Noisy:
        blank = Census(torch.ones_like(census.samples), torch.zeros_like(census.class_counts))
        key = random.derive(random.seed_key(~self.seed), random.NOISE)  # ~: no client draws from this stream
        return Noisy(self.inner.server_init(model, blank), key.to(model.mean.device))

    def server_receive(self, server: Noisy, clients: Tensor, ups: Any) -> Noisy:
        downs = messages(self.inner, server.server, clients)
        found = moves(ups, downs)
        weights = {name: t for part, own in found.items() if part not in SIZES for name, t in own.items()}
        short = scaled(weights, shrink(norms(weights), self.bound)) if weights else {}
        rows = {}
        total = (
            self.source.sums(random.derive(server.key, random.DRAW), [short], self.bound, self.noise) if short else {}
        )
        for name, t in short.items():
            rows[name] = (total[name] / self.joining).expand_as(t)
        rows |= {name: torch.ones_like(t) for part in SIZES & found.keys() for name, t in found[part].items()}
        after = self.inner.server_receive(server.server, clients, moved(ups, downs, rows))
        return Noisy(after, random.derive(server.key, random.NOISE))

    def server_train(self, model: Model, server: Noisy, key: Tensor) -> Noisy:
        return server._replace(server=self.inner.server_train(model, server.server, key))

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
