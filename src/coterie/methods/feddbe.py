"""Features get a personal bias on each client, and their mean is drawn to a consensus of all clients.

Jianqing Zhang, Yang Hua, Jian Cao, Hao Wang, Tao Song, Zhengui Xue, Ruhui Ma, Haibing Guan: Eliminating Domain Bias for
Federated Learning in Representation Space, NeurIPS 2023 (DBE, on top of FedAvg).
The head sees z + b_i, where b_i is trained and stays on the client; κ/2 |m_i - m|² / d draws the mean features m_i, a
moving average over batches, to the consensus m. Clients of the first round train without the pull and send the mean
features of their samples after it; their mean, by samples, is the consensus and never changes (the authors run a
separate round of all clients before training). Later clients send zeros in its place. The global model is tested
without a bias. The factor 1/2, κ and μ are those of the authors' code for Fashion-MNIST.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core.batch import Batch, Data, features
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import Protections, refused
from coterie.core.ranges import Samples
from coterie.core.statistics import vectors
from coterie.core.tree import Tree, average

RUNNING = "running_mean"  # BatchNorm's name: a loss may update such a tensor in place, and it is not trained


class WithBias(NamedTuple):
    weights: Weights
    bias: Tensor  # (d,)
    mean: Tree  # RUNNING: (d,) m_i


class Server(NamedTuple):
    weights: Weights
    consensus: Tensor  # (d,) m; zeros: not known yet


class State(NamedTuple):
    bias: Tensor  # (d,) b_i
    mean: Tensor  # (d,) m_i at the end of the client's last training
    momentum: Tree


class Down(NamedTuple):
    weights: Weights
    consensus: Tensor  # (d,)


class Up(NamedTuple):
    weights: Weights
    mean: Tensor  # (d,) mean features, for the consensus; zeros once it is known
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedDBE(Method[Server, State, Down, Up]):
    pull: float = field(default=50.0, metadata={"help": "pull of mean features to the consensus (κ)", "low": 0})
    inertia: float = field(
        default=0.0,
        metadata={"help": "share of earlier batches in the mean features (1 - μ)", "low": 0, "below": 1},
    )

    title: ClassVar[str] = "FedDBE"
    formula: ClassVar[str] = """
        ℓ(φ(z + b_i), y) + κ/2 |m_i - m|² / d trains θ, φ and b_i
        m_i ← (1 - μ) m_i + μ · mean of z over a batch
        m = Σ_i p_i · mean of z over client i, after round 1
    """
    family: ClassVar[str] = "personal layers"
    suits: ClassVar[tuple[str, ...]] = ("label shift", "feature shift")
    results: ClassVar[dict[str, str]] = {"FedDBE": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": refused("clients send mean features in the first round, which would need noise of their own"),
        "dp-sample": refused("clients send mean features in the first round, without noise"),
    }
    needs_encoder: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start, model.mean.new_zeros(model.dim))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights, server.consensus)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        zero = model.mean.new_zeros(model.dim)
        return State(zero, zero, self.train.start(WithBias(model.start, zero, {RUNNING: zero})))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        known, axis = down.consensus.any(), model.feature_axis

        def loss(w: WithBias, batch: Batch) -> Tensor:
            z = model.features(w.weights.encoder, batch.x)
            task = model.loss(model.logits(w.weights.head, shifted(model, z, w.bias)), batch)
            now = batch_mean(vectors(z, axis), batch.real)  # (d,)
            mean = self.inertia * w.mean[RUNNING] + (1 - self.inertia) * now
            w.mean[RUNNING].copy_(mean.detach())
            return task + self.pull / 2 * known * (mean - down.consensus).square().mean() if self.pull else task

        begin = WithBias(down.weights, state.bias, {RUNNING: state.mean})
        (weights, bias, mean), momentum = self.train(begin, loss, data, state.momentum)
        z = features(model, weights.encoder, data, epoch=self.train.local_epochs)
        found = data.mean(vectors(z, axis))
        return State(bias, mean[RUNNING], momentum), Up(weights, torch.where(known, 0.0, found), data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        mean = average(ups.mean, ups.samples)
        return Server(average(ups.weights, ups.samples), torch.where(server.consensus.any(), server.consensus, mean))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model.logits(down.weights.head, shifted(model, model.features(down.weights.encoder, x), state.bias))

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)


def shifted(model: Model, z: Tensor, bias: Tensor) -> Tensor:
    """Features z (B, ...) with the bias (d,) in every vector."""
    return (z.movedim(model.feature_axis, -1) + bias).movedim(-1, model.feature_axis)


def batch_mean(z: Tensor, real: Tensor | None) -> Tensor:
    """(d,) mean of the real rows of z (B, d)."""
    if real is None:
        return z.mean(0)
    return torch.where(real[:, None], z, 0.0).sum(0) / real.sum().clamp_min(1)
