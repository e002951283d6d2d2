"""The server sends each client a cloud model: a mixture of all models in which similar ones weigh more.

Yutao Huang, Lingyang Chu, Zirui Zhou, Lanjun Wang, Jiangchuan Liu, Jian Pei, Yong Zhang: Personalized Cross-Silo
Federated Learning on Non-IID Data, AAAI 2021.
Client i trains from its cloud model u_i on its loss + λ/(2α) |w - u_i|². FedAMP mixes by distance, u_i = w_i - α Σ_j
A'(|w_i - w_j|²) (w_i - w_j) with A(x) = 1 - exp(-x/σ); HeurFedAMP by the cosine of the angle between models. The paper
lowers α every 30 rounds and tunes σ; here both are constant. If the weights of all others sum to more than 1, they are
scaled to 1, so that a cloud model stays between the models. Models are those that clients sent last; clients that never
took part have no weight. Only trained parameters are compared. The paper leaves ξ_ii to the user: here it is 0.5 for
any number m of clients, half of the mixture; 1/m would weigh a client's own model like those of others. Defaults not
verified in the paper: λ, α, σ of both kinds and ξ_ii.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.errors import unknown
from coterie.core.losses import squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, HANDED_ON, OWN_ROWS, Protections, refused
from coterie.core.tree import Tree

KINDS = ("distance", "cosine")


class Server(NamedTuple):
    models: Weights  # (m, ...) w_j, as clients sent them last
    joined: Tensor  # (m,) whether a client has sent one
    attention: Tensor  # (m, m) ξ: row i is the mixture of client i


class State(NamedTuple):
    weights: Weights  # w_i, the personal model
    momentum: Tree


class Down(NamedTuple):
    weights: Weights  # u_i, the cloud model


class Up(NamedTuple):
    weights: Weights  # w_i


@dataclass(frozen=True)
class FedAMP(Method[Server, State, Down, Up]):
    attention: str = field(
        default="distance", metadata={"help": "similarity of models: distance, or cosine as in HeurFedAMP"}
    )
    pull: float = field(default=1.0, metadata={"help": "strength of the attention in the objective (λ)", "low": 0})
    step: float = field(default=1e4, metadata={"help": "step of the server along the attention (α)", "above": 0})
    width: float = field(default=1e6, metadata={"help": "width of the attention over distances (σ)", "above": 0})
    own_share: float = field(
        default=0.5, metadata={"help": "share of a client's own model, for cosine (ξ_ii)", "low": 0, "high": 1}
    )
    sharpness: float = field(default=100.0, metadata={"help": "sharpness of the attention, for cosine (σ)", "low": 0})

    title: ClassVar[str] = "FedAMP"
    formula: ClassVar[str] = """
        u_i = w_i - α Σ_j A'(|w_i - w_j|²) (w_i - w_j),  A(x) = 1 - e^{-x/σ}        FedAMP
        u_i = ξ_ii w_i + (1 - ξ_ii) Σ_j≠i softmax_j(σ cos(w_i, w_j)) w_j                HeurFedAMP
        w_i ← SGD(f_i(w) + λ/(2α) |w - u_i|²; u_i)
    """
    family: ClassVar[str] = "collaborators"
    suits: ClassVar[tuple[str, ...]] = ("few clients",)
    results: ClassVar[dict[str, str]] = {"FedAMP": "post"}
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused(f"{HANDED_ON}, in mixtures that depend on single models"),
        "dp-sample": ALLOWED,
    }

    def __post_init__(self) -> None:
        if self.attention not in KINDS:
            raise unknown("attention", self.attention, KINDS)

    def server_init(self, model: Model, census: Census) -> Server:
        m, like = len(census.samples), model.mean
        models = tree.apply(lambda t: t.expand(m, *t.shape).clone(), model.start)
        joined = torch.zeros(m, dtype=torch.bool, device=like.device)
        return Server(models, joined, torch.eye(m, dtype=like.dtype, device=like.device))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(tree.mix(server.models, server.attention[client]))

    def server_greet(self, server: Server) -> Down:
        """The mean of all models that clients have sent."""
        share = server.joined.double() / server.joined.sum().clamp_min(1)
        return Down(tree.mix(server.models, torch.where(server.joined.any(), share, 1 / len(share))))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        strength = self.pull / (2 * self.step)

        def loss(w: Weights, batch: Batch) -> Tensor:
            task = model.loss(model(w, batch.x), batch)
            return task + strength * squared_distance(w, down.weights) if strength else task  # eq. (4)

        weights, momentum = self.train(down.weights, loss, data, state.momentum)
        return State(weights, momentum), Up(weights)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        models = tree.put(server.models, clients, ups.weights)
        joined = server.joined.index_fill(0, clients, True)
        return Server(models, joined, self.mixture(models, joined).to(server.attention.dtype))

    def mixture(self, models: Weights, joined: Tensor) -> Tensor:
        """(m, m) ξ, rows sum to 1."""
        m = len(joined)
        others = joined & ~torch.eye(m, dtype=torch.bool, device=joined.device)  # (m, m) j != i that have joined
        products = torch.stack([gram(t) for t in tree.trained(models).values()]).sum(0)
        squares = products.diagonal()
        if self.attention == "cosine":
            cosine = products / (squares[:, None] * squares).sqrt().clamp_min(1e-30)
            scores = torch.where(others, self.sharpness * cosine, -torch.inf)
            share = torch.where(others.any(1, keepdim=True), scores, 0.0).softmax(1) * (1 - self.own_share)
            weights = torch.where(others, share, 0.0)  # eq. (8)
        else:
            distance = (squares[:, None] + squares - 2 * products).clamp_min(0)
            weights = torch.where(others, self.step / self.width * (-distance / self.width).exp(), 0.0)  # α A'
            weights = weights / weights.sum(1, keepdim=True).clamp_min(1)
        return weights + torch.diag(1 - weights.sum(1))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)

    def server_report(self, server: Server) -> Tree:
        return {"attention": server.attention}


def gram(rows: Tensor) -> Tensor:
    """(m, m) inner products of rows (m, ...), in float64: small distances between large models need the digits."""
    flat = rows.flatten(1).double()
    return flat @ flat.T
