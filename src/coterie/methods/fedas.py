"""Clients align the received encoder with their previous one, and count by the information in their models.

Xiyuan Yang, Wenke Huang, Mang Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024.
Heads are personal. Before training, the received encoder learns for an epoch to give the class means of features that
the client's previous encoder gives; a client that has not trained yet has none and skips this. As in the authors' code,
the alignment loss sums the classes of a batch, alignment takes plain steps, and the trace of the Fisher information is
the sum over batches of the squared gradient of the mean loss, in evaluation mode; it is here over all samples, also
those of an incomplete batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data, features
from coterie.core.data import Transform
from coterie.core.losses import squared_error
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import Protections, refused
from coterie.core.ranges import Range
from coterie.core.statistics import class_statistics
from coterie.core.steps import fold
from coterie.core.tree import Tree


class Server(NamedTuple):
    encoder: Tree


class State(NamedTuple):
    weights: Weights  # the client's model after its last training
    trainings: Tensor  # () so far
    momentum: Tree


class Down(NamedTuple):
    encoder: Tree


class Up(NamedTuple):
    encoder: Tree
    information: Annotated[Tensor, Range(0)]  # () trace of the Fisher information


@dataclass(frozen=True)
class FedAS(Method[Server, State, Down, Up]):
    align_epochs: int = field(default=1, metadata={"help": "epochs of alignment before training", "low": 0})
    align_lr: float = field(default=0.01, metadata={"help": "learning rate of alignment", "low": 0})
    align_batch: int = field(default=16, metadata={"help": "samples per batch of alignment", "low": 1})

    title: ClassVar[str] = "FedAS"
    formula: ClassVar[str] = """
        θ' = SGD(Σ_k mean of |z - c_k|² / d over class k; θ),  c_k: class means of the previous θ_i
        (θ_i, φ_i) ← SGD(f_i; θ', φ_i)
        θ ← Σ_i F_i θ_i / Σ_i F_i,  F_i: trace of the Fisher information
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedAS": "post"}
    protections: ClassVar[Protections] = {
        "dp-client": refused("its server weights clients by the information that they send"),
        "dp-sample": refused("clients send the Fisher information of their samples, without noise"),
    }
    needs_classes: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True
    needs_encoder: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start.encoder)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, model.mean.new_zeros(()), self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        aligned = self.aligned(model, state, down, data)
        weights, momentum = self.train(
            Weights(aligned, state.weights.head),
            lambda w, batch: model.loss(model(w, batch.x), batch),
            data,
            state.momentum,
        )
        return State(weights, state.trainings + 1, momentum), Up(
            weights.encoder, self.information(model, weights, data)
        )

    def aligned(self, model: Model, state: State, down: Down, data: Data) -> Tree:
        """The received encoder after alignment with the class means of the previous one."""
        if not self.align_epochs:
            return down.encoder
        still = replace(data, transform=Transform())
        z = features(model, state.weights.encoder, still)
        means = class_statistics(z, data.y, data.classes, data.real).means  # (K, d)

        def loss(encoder: Tree, batch: Batch) -> Tensor:
            member = batch.y[:, None] == torch.arange(data.classes, device=batch.y.device)  # (B, K)
            if batch.real is not None:
                member = member & batch.real[:, None]
            counts = member.to(data.rate.dtype).sum(0)  # (K,)
            weight = counts.sum() / counts[batch.y].clamp_min(1)  # their mean over the batch sums means of classes
            return weight * squared_error(model.features(encoder, batch.x), means[batch.y])

        align = self.train.plain().but(
            local_epochs=self.align_epochs, lr=self.align_lr, batch_size=self.align_batch, drop_last=False
        )
        encoder, _ = align(down.encoder, loss, data, {})
        return tree.where(state.trainings > 0, encoder, down.encoder)

    def information(self, model: Model, weights: Weights, data: Data) -> Tensor:
        """() trace of the Fisher information: Σ over batches of ||∇ mean loss||²."""
        params, statistics = tree.trained(weights), {n: t for n, t in tree.items(weights) if tree.is_statistic(n)}

        def loss(w: Weights, batch: Batch) -> Tensor:  # plain dictionaries: evaluation mode
            return model.loss(model(Weights(dict(w.encoder), dict(w.head)), batch.x), batch)

        def add(trace: Tensor, batch: Batch) -> Tensor:
            slope, _ = self.train.gradient(weights, loss, batch, params, statistics)
            square = torch.stack([g.square().sum() for g in slope.values()]).sum()
            return trace + (square if batch.active is None else torch.where(batch.active, square, 0.0))

        once = self.train.but(local_epochs=1, drop_last=False)
        still = replace(data, transform=Transform())
        return fold(torch.zeros_like(data.rate), ((add, run) for run in once.runs(still)))

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        known = ups.information.sum() > 0
        return Server(tree.average(ups.encoder, torch.where(known, ups.information, 1.0)))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        encoder = tree.where(state.trainings > 0, state.weights.encoder, down.encoder)
        return model(Weights(encoder, state.weights.head), x)
