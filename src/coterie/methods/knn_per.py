"""FedAvg whose predictions each client interpolates with a nearest-neighbor vote over its own samples.

Othmane Marfoq, Giovanni Neglia, Richard Vidal, Laetitia Kameni: Personalized Federated Learning through Local
Memorization, ICML 2022.
Probabilities are interpolated, not logits; distances are squared; features are those of samples without augmentation.
The paper tunes the weight of the vote for each client; here it is one number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.batch import Data, features
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Datastore(NamedTuple):
    """Features and labels of a client's samples."""

    features: Tensor  # (n, d)
    labels: Tensor  # (n,)
    real: Tensor  # (n,) False where a row is padding


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    momentum: Tree
    datastore: Datastore | tuple[()]  # after the last round


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class KNNPer(Method[Server, State, Down, Up]):
    neighbours: int = field(
        default=10, metadata={"help": "nearest samples that vote, or all if a client has fewer (k)", "low": 1}
    )
    vote: float = field(
        default=0.5, metadata={"help": "weight of the neighbors' vote; the model has the rest (λ)", "low": 0, "high": 1}
    )
    width: float = field(default=1.0, metadata={"help": "width of the kernel, per feature (σ)", "above": 0})

    title: ClassVar[str] = "kNN-Per"
    formula: ClassVar[str] = """
        p(k | x) = λ Σ_n [y_n = k] e^{-|z - z_n|² / (σ d)} / Σ_n e^{-|z - z_n|² / (σ d)} + (1 - λ) softmax(φ(z))_k
        n: the k nearest samples of the client
    """
    family: ClassVar[str] = "fine-tuning"
    suits: ClassVar[tuple[str, ...]] = ("label shift", "new clients")
    results: ClassVar[dict[str, str]] = {"kNN-Per": "finished"}
    needs_classes: ClassVar[bool] = True
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True  # before there is a datastore

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start), datastore=())

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum, state.datastore), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        z = features(model, down.weights.encoder, data.of(data.x))  # un-augmented
        real = torch.ones_like(data.y, dtype=torch.bool) if data.real is None else data.real
        return State(state.momentum, Datastore(z, data.y, real))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        z = model.features(down.weights.encoder, x)
        logits = model.logits(down.weights.head, z)
        if not state.datastore:
            return logits
        mixed = self.vote * self.votes(state.datastore, z, model.classes) + (1 - self.vote) * logits.softmax(1)
        return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()  # finite for classes without votes

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)

    def votes(self, datastore: Datastore, z: Tensor, classes: int) -> Tensor:
        """(B, K) class probabilities from the nearest samples."""
        exact = "donot_use_mm_for_euclid_dist"  # a matrix product would lose digits
        distance = torch.cdist(z, datastore.features, compute_mode=exact).square()  # (B, n)
        distance = torch.where(datastore.real, distance, torch.inf)  # padding is far from everything
        nearest = distance.topk(min(self.neighbours, len(datastore.labels)), largest=False)  # (B, k)
        kernel = (-nearest.values / (z.shape[1] * self.width)).softmax(1)  # 0 for padding
        member = F.one_hot(datastore.labels[nearest.indices], classes).to(z.dtype)  # (B, k, K)
        return torch.einsum("bk,bkc->bc", kernel, member)
