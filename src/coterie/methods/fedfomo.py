"""No shared model: clients get a few models of others, keep of each as much as it helps on held-out samples, and train.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021.
The affinity adds up all values that a client gave a model; ties are broken at random (as in the authors' code).
Where there are too few models to send, as in the first round, a client gets its own back, which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Data, sample_losses
from coterie.core.errors import CoterieError
from coterie.core.losses import cross_entropy, squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import HANDED_ON, Protections, refused, robust
from coterie.core.tree import Tree


class Server(NamedTuple):
    models: Weights  # of all m clients, as last uploaded
    uploaded: Tensor  # (m,) who did so in the last round
    affinity: Tensor  # (m, m) A: row i = what models were worth to client i
    round: Tensor  # () how many were played


class State(NamedTuple):
    weights: Weights  # w_i
    momentum: Tree
    key: Tensor  # () the same in all rounds: which samples are held out


class Down(NamedTuple):
    models: Weights  # of M clients


class Up(NamedTuple):
    weights: Weights
    values: Tensor  # (M,) q: what each model was worth


@dataclass(frozen=True)
class FedFomo(Method[Server, State, Down, Up]):
    models: int = field(default=5, metadata={"help": "models that a client gets in a round (M)"})
    held_out: float = field(default=0.2, metadata={"help": "share of the samples that judge models, not trained on"})
    explore: float = field(default=0.3, metadata={"help": "chance of a random model, in the first round (ε)"})
    explore_decay: float = field(default=0.05, metadata={"help": "how much less that chance is every round"})

    title: ClassVar[str] = "FedFomo"
    results: ClassVar[dict[str, str]] = {"FedFomo": "post"}
    protections: ClassVar[Protections] = {
        **robust(refused(f"{HANDED_ON}, who judge it themselves on their own samples")),
        "dp-client": refused(f"{HANDED_ON}, not a mean of many"),
        "dp-sample": refused("clients send how much each model is worth on their held-out samples, without noise"),
    }

    def __post_init__(self) -> None:
        if self.models < 1:
            raise CoterieError(f"models sent to a client must be at least 1, not {self.models}")
        if not 0 < self.held_out < 1:
            raise CoterieError(f"the share of held-out samples must be above 0 and below 1, not {self.held_out}")

    def server_init(self, model: Model, census: Census) -> Server:
        m = len(census.samples)
        models = tree.apply(lambda t: t.expand(m, *t.shape).clone(), model.start)
        nobody = torch.zeros(m, dtype=torch.bool, device=model.mean.device)
        return Server(models, nobody, model.mean.new_zeros(m, m), torch.zeros_like(nobody[0], dtype=torch.int64))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(tree.pick(server.models, self.chosen(server, client)))

    def chosen(self, server: Server, client: Tensor) -> Tensor:
        """(M,) whose models this client gets: those of the largest affinity, each with some chance any other."""
        everyone = torch.arange(len(server.uploaded), device=server.uploaded.device)
        own, affinity = everyone[client], server.affinity[client]
        left = server.uploaded & (everyone != own)  # (m,) who can still be chosen
        key = random.fold(torch.zeros_like(own), random.EXPLORE, server.round, own)
        chance = (self.explore - self.explore_decay * server.round).clamp_min(0)
        picks = []
        for place in range(self.models):
            best = left & (affinity == torch.where(left, affinity, -torch.inf).max())
            draws = random.bits(random.fold(key, place), torch.arange(len(everyone) + 1, device=everyone.device))
            pool = torch.where(draws[-1] < chance * 2.0**63, left, best)
            pick = torch.where(left.any(), torch.where(pool, draws[:-1], -1).argmax(), own)
            left = left & (everyone != pick)
            picks.append(pick)
        return torch.stack(picks)

    def server_greet(self, server: Server) -> Down:
        """The models that others value most."""
        value = torch.where(server.uploaded, server.affinity.mean(0), -torch.inf)
        return Down(tree.pick(server.models, value.topk(min(self.models, len(value))).indices))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, self.train.start(model.start), data.key)

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        held_out, others = replace(data, key=state.key).split(self.held_out)
        values = self.values(model, state.weights, down.models, held_out)
        useful = values.clamp_min(0)
        share = useful / torch.where(useful.any(), useful.sum(), 1)  # (M,), all zero if no model helps
        mixed = tree.apply(
            lambda own, them: own + torch.tensordot(share, them - own, dims=1), state.weights, down.models
        )
        weights, momentum = self.train(
            mixed,
            lambda w, batch: cross_entropy(model(w, batch.x), batch.y),
            replace(others, key=data.key),
            state.momentum,
        )
        return State(weights, momentum, state.key), Up(weights, values)

    def values(self, model: Model, own: Weights, models: Weights, held_out: Data) -> Tensor:
        """(M,) q_n = (L(w_i) - L(w_n)) / ||w_n - w_i||: how much better each model is, for the way to it."""

        def loss(w: Weights) -> Tensor:
            return held_out.mean(sample_losses(model, w, held_out))

        def value(w: Weights) -> Tensor:
            way = squared_distance(w, own).sqrt()
            return torch.where(way > 0, (here - loss(w)) / (way + 1e-5), 0.0)  # rounding is no gain: own is worth 0

        here = loss(own)
        return torch.func.vmap(value)(models)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        sent = torch.func.vmap(lambda client: self.chosen(server, client))(clients)  # (S, M)
        affinity = server.affinity.index_put((clients[:, None], sent), ups.values, accumulate=True)
        uploaded = torch.zeros_like(server.uploaded).index_fill(0, clients, True)
        return Server(tree.put(server.models, clients, ups.weights), uploaded, affinity, server.round + 1)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)

    def server_report(self, server: Server) -> Tree:
        return {"affinity": server.affinity}
