"""FedAvg with a dynamic regularizer, which makes the optima of the clients' losses agree with the global optimum.

Durmus Alp Emre Acar, Yue Zhao, Ramon {Matas Navarro}, Matthew Mattina, Paul N. Whatmough, Venkatesh Saligrama:
Federated Learning Based on Dynamic Regularization, ICLR 2021.
As in the authors' code: the regularizer is weaker for clients with more samples, and gradients are clipped.
Unlike their code: the gradient of the whole regularizer is clipped; theirs adds the part α θ after clipping, as weight
decay. The model that is tested is the one broadcast; the authors test the mean of the participants' models
(`test_mean`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.errors import unknown
from coterie.core.losses import inner_product, squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, WELCOME, Protections, refused
from coterie.core.tree import Tree

NORMS = ("squared", "unsquared")


class Server(NamedTuple):
    mean: Weights  # of the participants' models in the last round
    drift: Tree  # (1/m) Σ_j g_j over all clients, for trained parameters; in the paper -h/α
    samples: Tensor  # (m,) n_i of all clients


class State(NamedTuple):
    drift: Tree  # g_i: sum of all its updates; in the paper -∇L_i/α
    pull: Tensor  # () α_i
    momentum: Tree


class Down(NamedTuple):
    weights: Weights  # w^t


class Up(NamedTuple):
    weights: Weights  # θ_i


@dataclass(frozen=True)
class FedDyn(Method[Server, State, Down, Up]):
    pull: float = field(default=0.01, metadata={"help": "strength of the dynamic regularizer (α)", "low": 0})
    largest_gradient: float = field(
        default=10.0,
        metadata={"help": "largest norm of a gradient, unless clip_gradient is set; 0: no limit", "low": 0},
    )
    norm: str = field(
        default="squared",
        metadata={"help": "distance to the received model: squared, or unsquared as in some libraries"},
    )
    test_mean: bool = field(
        default=False, metadata={"help": "evaluate the mean of the participants' models as the global model"}
    )

    title: ClassVar[str] = "FedDyn"
    formula: ClassVar[str] = """
        w_i = SGD(f_i(w') + α_i (|w' - w|² / 2 + ⟨g_i, w'⟩); w)
        g_i ← g_i + w_i - w,  g ← g + Σ_i (w_i - w) / m
        w ← mean of w_i + g
    """
    family: ClassVar[str] = "global model"
    results: ClassVar[dict[str, str]] = {"FedDyn": "pre"}
    protections: ClassVar[Protections] = {"dp-client": refused(WELCOME), "dp-sample": ALLOWED}

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise unknown("norm", self.norm, NORMS)

    def server_init(self, model: Model, census: Census) -> Server:
        drift = tree.apply(torch.zeros_like, tree.trained(model.start))
        return Server(model.start, drift, model.mean.new_tensor(census.samples.tolist()))

    def server_welcome(self, server: Server) -> Tree:
        return {"mean_samples": server.samples.mean()}

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(broadcast(server))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        pull = self.pull * welcome["mean_samples"] / data.samples
        drift = tree.apply(torch.zeros_like, tree.trained(model.start))
        return State(drift, pull, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:  # its gradient: that of the task + α_i (θ - w^t + g_i)
            task = model.loss(model(w, batch.x), batch)
            return task + state.pull * (self.penalty(w, down.weights) + inner_product(w, state.drift))  # eq. (1)

        clipped = self.train.but(clip_gradient=self.train.clip_gradient or self.largest_gradient)
        weights, momentum = clipped(down.weights, loss, data, state.momentum)
        moved = tree.apply(torch.sub, tree.trained(weights), tree.trained(down.weights))
        return State(tree.apply(torch.add, state.drift, moved), state.pull, momentum), Up(weights)

    def penalty(self, weights: Weights, received: Weights) -> Tensor:
        squared = squared_distance(weights, received)
        if self.norm == "squared":
            return squared / 2
        return squared.clamp_min(1e-30).sqrt() / 2  # clamped: the gradient at distance 0 is 0, not NaN

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        mean = tree.apply(lambda t: t.mean(0), ups.weights)
        everyone = len(server.samples)  # m: clients that did not take part keep their g_j
        drift = tree.apply(
            lambda g, w, trained: g + (trained - w).sum(0) / everyone,
            server.drift,
            tree.trained(broadcast(server)),
            tree.trained(ups.weights),
        )
        return Server(mean, drift, server.samples)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.mean if self.test_mean else broadcast(server), x)


def broadcast(server: Server) -> Weights:
    """w: the mean of the participants' models plus the mean drift of all clients."""
    shifted = tree.apply(torch.add, tree.trained(server.mean), server.drift)
    return tree.fill(server.mean, tree.flatten(server.mean) | shifted)
