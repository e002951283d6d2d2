"""Clients align features to class prototypes that the server trains to be far apart, with a margin that adapts.

Jianqing Zhang, Yang Liu, Yang Hua, Jian Cao: FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning, AAAI 2024.
All clients have one architecture here, and the classifier is tested, not the nearest prototype. Features are aligned
by their mean squared error to the prototype of their class, as in FedProto. The first round has no prototypes, and
neither has a class before a client has sent it. Class means are computed in a separate pass after training. λ is that
of the authors' code, for the mean squared error; the paper's 0.1 is for the Euclidean distance. The server's batch and
learning rate are those of the code too, whose margin is smaller: the largest of the classes' smallest distances.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.batch import Batch, Data, features
from coterie.core.init import generator, linear, normal
from coterie.core.losses import cross_entropy, squared_error
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import (
    ALLOWED,
    COUNTED,
    OWN_ENCODERS,
    SEND_STATISTICS,
    STATISTICS_ONLY,
    Protections,
    refused,
    robust,
)
from coterie.core.ranges import Counted
from coterie.core.statistics import class_samples, class_statistics, merge_means, present
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree


class Prototypes(NamedTuple):
    """What the server trains."""

    table: Tensor  # (K, d) one vector per class
    layers: Tree  # of F, which all classes share


class Server(NamedTuple):
    trained: Prototypes
    seen: Tensor  # (K,) 1: a client has sent this class
    prototypes: Tensor  # (S, K, d) P_i of the last participants
    counts: Tensor  # (S, K)


class State(NamedTuple):
    weights: Weights
    momentum: Tree


class Down(NamedTuple):
    prototypes: Tensor  # (K, d) trained by the server; a zero row: class not seen yet


class Up(NamedTuple):
    prototypes: Tensor  # (K, d) P_i: class means of features
    counts: Counted  # (K,)


@dataclass(frozen=True)
class FedTGP(Method[Server, State, Down, Up]):
    align: float = field(
        default=10.0, metadata={"help": "strength of feature alignment (λ); 0 switches it off", "low": 0}
    )
    margin: float = field(default=100.0, metadata={"help": "largest margin between prototypes (τ)", "low": 0})
    server_epochs: int = field(default=100, metadata={"help": "epochs of the prototypes per round (S)", "low": 0})
    server_batch: int = field(default=10, metadata={"help": "class means per step of the prototypes", "low": 1})
    server_lr: float = field(default=0.01, metadata={"help": "learning rate of the prototypes", "low": 0})

    title: ClassVar[str] = "FedTGP"
    formula: ClassVar[str] = """
        w_i ← SGD(f_i + λ |z - P_y|² / d; w_i)
        P ← SGD of Σ_i Σ_k -log e^{-(|c_ik - P_k| + δ)} / (e^{-(|c_ik - P_k| + δ)} + Σ_l≠k e^{-|c_ik - P_l|})
        δ = min(max |c_k - c_l|, τ),  c_ik: mean of z over class k of client i,  c_k: mean of c_ik
    """
    family: ClassVar[str] = "prototypes"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedTGP": "post"}
    protections: ClassVar[Protections] = {
        **robust(refused(STATISTICS_ONLY), "robust-clip"),
        "dp-client": refused(f"its server trains on the class means of every client, not on their mean; {COUNTED}"),
        "dp-sample": refused(SEND_STATISTICS),
        "dp-statistics": refused(OWN_ENCODERS),
        "dp-both": ALLOWED,
    }
    needs_classes: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        draw, like, k, d = generator(model), model.mean, model.classes, model.dim
        table, layers = normal(draw, (k, d), like), {}
        for name in ("middle", "out"):
            layers[f"{name}.weight"], layers[f"{name}.bias"] = linear(draw, d, (d,), like)
        zeros = like.new_zeros
        return Server(Prototypes(table, layers), zeros(k), zeros(0, k, d), zeros(0, k))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.seen[:, None] * processed(server.trained))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        seen = down.prototypes.any(1)  # (K,) classes without a prototype are not aligned

        def loss(w: Weights, batch: Batch) -> Tensor:
            z = model.features(w.encoder, batch.x)
            task = model.loss(model.logits(w.head, z), batch)
            if not self.align:
                return task
            return task + self.align * seen[batch.y] * squared_error(z, down.prototypes[batch.y])

        weights, momentum = self.train(state.weights, loss, data, state.momentum)
        z = features(model, weights.encoder, data, epoch=self.train.local_epochs)
        found = class_statistics(z, data.y, data.classes, data.real)
        return State(weights, momentum), Up(found.means, found.counts)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        here = present(ups.counts).any(0).to(server.seen.dtype)
        return Server(server.trained, torch.maximum(server.seen, here), ups.prototypes, ups.counts)

    def server_train(self, model: Model, server: Server, key: Tensor) -> Server:
        training = LocalTraining(local_epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr)
        margin = self.adapted(server.prototypes, server.counts)

        def loss(trained: Prototypes, batch: Batch) -> Tensor:
            """(B,) contrastive loss of class means: near to the prototype of their class, far from all others."""
            distances = distance(batch.x[:, None], processed(trained))  # (B, K)
            own = F.one_hot(batch.y, len(trained.table))
            return cross_entropy(-distances - margin * own, batch.y)

        trained, _ = training(server.trained, loss, class_samples(server.prototypes, server.counts, key), {})
        return server._replace(trained=trained)

    def adapted(self, means: Tensor, counts: Tensor) -> Tensor:
        """() δ: the largest distance between the mean prototypes of two classes, at most τ."""
        have = present(counts).to(means.dtype)  # (S, K)
        centers = merge_means(means, have, means.new_zeros(means.shape[1:]))  # (K, d) Q
        both = have.any(0) & have.any(0)[:, None]
        return torch.where(both, distance(centers[:, None], centers), 0.0).max().clamp_max(self.margin)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)


def processed(trained: Prototypes) -> Tensor:
    """(K, d) F of the table: two dense layers."""
    table, layers = trained
    hidden = (table @ layers["middle.weight"].T + layers["middle.bias"]).relu()
    return hidden @ layers["out.weight"].T + layers["out.bias"]


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean, over the last axis; its gradient at zero is zero."""
    square = (a - b).square().sum(-1)
    return torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
