"""FedAvg with a contrastive loss: features should resemble those of the shared model, not of the client's last model.

Qinbin Li, Bingsheng He, Dawn Song: Model-Contrastive Federated Learning, CVPR 2021.
Features are the inputs of the network's head. The paper's networks have a projection head of two layers before it; add
one to a network that should have it. The models that features are compared with run in evaluation mode. In its first
round, a client's previous model is the initial one. The paper tunes μ for every dataset: 5, 1 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    previous: Tree  # encoder of the client's last local model
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class MOON(Method[Server, State, Down, Up]):
    contrast: float = field(default=1.0, metadata={"help": "weight of the contrastive loss (μ); 0: off", "low": 0})
    temperature: float = field(default=0.5, metadata={"help": "temperature of the contrastive loss (τ)", "above": 0})

    title: ClassVar[str] = "MOON"
    formula: ClassVar[str] = """
        w_i = SGD(f_i + μ ℓ; w),  ℓ = -log e^{s/τ} / (e^{s/τ} + e^{s'/τ})
        s = cos(z, z of w),  s' = cos(z, z of the previous w_i)
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "global model"
    results: ClassVar[dict[str, str]] = {"MOON": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True
    needs_encoder: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start.encoder, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def similarity(z: Tensor, encoder: Tree, x: Tensor) -> Tensor:
            return F.cosine_similarity(z, model.features(encoder, x), dim=model.feature_axis) / self.temperature

        def loss(w: Weights, batch: Batch) -> Tensor:
            z = model.features(w.encoder, batch.x)
            task = model.loss(model.logits(w.head, z), batch)
            if not self.contrast:
                return task
            shared, previous = (similarity(z, e, batch.x) for e in (down.weights.encoder, state.previous))
            apart = F.softplus(previous - shared)  # eq. (3): -log(exp(shared) / (exp(shared) + exp(previous)))
            return task + self.contrast * apart.reshape(len(z), -1).mean(1)

        weights, momentum = self.train(down.weights, loss, data, state.momentum)
        return State(weights.encoder, momentum), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
