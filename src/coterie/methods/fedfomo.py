"""Each client receives a few models of others and mixes in those that lower its loss on held-out samples.

Michael Zhang, Karan Sapra, Sanja Fidler, Serena Yeung, Jose M. Alvarez: Personalized Federated Learning with First
Order Model Optimization, ICLR 2021.
The affinity sums all values that a client gave a model; ties are broken at random (as in the authors' code).
If there are too few models to send, as in the first round, a client receives its own, which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Data, each, sample_losses
from coterie.core.losses import squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import HANDED_ON, Protections, refused, robust
from coterie.core.tree import Tree


class Server(NamedTuple):
    models: Weights  # of all m clients, as last uploaded
    uploaded: Tensor  # (m,) which clients uploaded in the last round
    affinity: Tensor  # (m, m) A: row i = value of each model to client i
    round: Tensor  # () number of completed rounds


class State(NamedTuple):
    weights: Weights  # w_i
    momentum: Tree
    key: Tensor  # () selects the held-out samples; the same in all rounds


class Down(NamedTuple):
    models: Weights  # of M clients


class Up(NamedTuple):
    weights: Weights
    values: Tensor  # (M,) q: value of each model


@dataclass(frozen=True)
class FedFomo(Method[Server, State, Down, Up]):
    models: int = field(default=5, metadata={"help": "models that a client receives per round (M)", "low": 1})
    held_out: float = field(
        default=0.2, metadata={"help": "share of samples held out to judge models", "above": 0, "below": 1}
    )
    explore: float = field(
        default=0.3, metadata={"help": "probability of a random model in the first round (ε)", "low": 0, "high": 1}
    )
    explore_decay: float = field(default=0.05, metadata={"help": "decrease of that probability per round", "low": 0})

    title: ClassVar[str] = "FedFomo"
    formula: ClassVar[str] = """
        q_n = (L_i(w_i) - L_i(w_n)) / |w_n - w_i|, L_i: loss on held-out samples
        w_i ← SGD(f_i; w_i + Σ_n max(q_n, 0) (w_n - w_i) / Σ_n max(q_n, 0))
    """
    family: ClassVar[str] = "collaborators"
    suits: ClassVar[tuple[str, ...]] = ("few clients",)
    results: ClassVar[dict[str, str]] = {"FedFomo": "post"}
    protections: ClassVar[Protections] = {
        **robust(refused(f"{HANDED_ON}, which judge it on their own samples")),
        "dp-client": refused(f"{HANDED_ON}, not a mean of many"),
        "dp-sample": refused("clients send the value of each model on their held-out samples, without noise"),
    }

    def server_init(self, model: Model, census: Census) -> Server:
        m = len(census.samples)
        models = tree.apply(lambda t: t.expand(m, *t.shape).clone(), model.start)
        uploaded = torch.zeros(m, dtype=torch.bool, device=model.mean.device)
        return Server(models, uploaded, model.mean.new_zeros(m, m), torch.zeros_like(uploaded[0], dtype=torch.int64))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(tree.pick(server.models, self.chosen(server, client)))

    def chosen(self, server: Server, client: Tensor) -> Tensor:
        """(M,) ids of the models for this client: the highest affinity, or with probability ε a random one."""
        everyone = torch.arange(len(server.uploaded), device=server.uploaded.device)
        own, affinity = everyone[client], server.affinity[client]
        left = server.uploaded & (everyone != own)  # (m,) clients that can still be chosen
        key = random.derive(torch.zeros_like(own), random.EXPLORE, server.round, own)
        chance = (self.explore - self.explore_decay * server.round).clamp_min(0)
        picks = []
        for place in range(self.models):
            best = left & (affinity == torch.where(left, affinity, -torch.inf).max())
            draws = random.bits(random.derive(key, place), torch.arange(len(everyone) + 1, device=everyone.device))
            pool = torch.where(draws[-1] < chance * 2.0**63, left, best)
            pick = torch.where(left.any(), torch.where(pool, draws[:-1], -1).argmax(), own)
            left = left & (everyone != pick)
            picks.append(pick)
        return torch.stack(picks)

    def server_greet(self, server: Server) -> Down:
        """The models with the highest mean affinity."""
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
            lambda w, batch: model.loss(model(w, batch.x), batch),
            replace(others, key=data.key),
            state.momentum,
        )
        return State(weights, momentum, state.key), Up(weights, values)

    def values(self, model: Model, own: Weights, models: Weights, held_out: Data) -> Tensor:
        """(M,) q_n = (L(w_i) - L(w_n)) / ||w_n - w_i||: the improvement by each model per distance to it."""

        def loss(w: Weights) -> Tensor:
            return held_out.mean(sample_losses(model, w, held_out))

        def value(w: Weights) -> Tensor:
            distance = squared_distance(w, own).sqrt()
            return torch.where(distance > 0, (here - loss(w)) / (distance + 1e-5), 0.0)  # exactly 0 for its own

        here = loss(own)
        return each(value, (models,), held_out)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        sent = torch.func.vmap(lambda client: self.chosen(server, client))(clients)  # (S, M)
        affinity = server.affinity.index_put((clients[:, None], sent), ups.values, accumulate=True)
        uploaded = torch.zeros_like(server.uploaded).index_fill(0, clients, True)
        return Server(tree.put(server.models, clients, ups.weights), uploaded, affinity, server.round + 1)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)

    def server_report(self, server: Server) -> Tree:
        return {"affinity": server.affinity}
