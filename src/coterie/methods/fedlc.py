"""FedAvg with logits that each client calibrates by its class counts, so that rare classes get larger margins.

Jie Zhang, Zhiqi Li, Bo Li, Jianghe Xu, Shuang Wu, Shouhong Ding, Chao Wu: Federated Learning with Label Distribution
Skew via Logits Calibration, ICML 2022.
The loss is the cross entropy of u_c - τ n_c^(-1/4), with the client's own class counts n_c. Its softmax is over all
classes: the sum in the paper's equation leaves out the true class, and so has no lower bound. Absent classes have an
infinite margin, so they are excluded. The global model predicts with plain logits. Default not verified in the
paper: τ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections, unless
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedLC(Method[Server, State, Down, Up]):
    margin: float = field(
        default=1.0, metadata={"help": "strength of the calibration (τ); 0 switches it off", "low": 0}
    )

    title: ClassVar[str] = "FedLC"
    formula: ClassVar[str] = """
        w_i = SGD of -log e^{u_y - τ n_y^(-1/4)} / Σ_k e^{u_k - τ n_k^(-1/4)}, from w
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "global model"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedLC": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": ALLOWED,
        "dp-sample": unless("its loss depends on class counts, without noise", margin=0.0),
    }
    personal_is_global: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        margins = self.margins(data.counts)

        def loss(w: Weights, batch: Batch) -> Tensor:
            return model.loss(model(w, batch.x) - margins if self.margin else model(w, batch.x), batch)

        weights, momentum = self.train(down.weights, loss, data, state.momentum)
        return State(momentum), Up(weights, data.samples)

    def margins(self, counts: Tensor) -> Tensor:
        """(K,) τ n_c^(-1/4). Absent classes: 1e9, which excludes them; infinity times 0 would be nan."""
        return torch.where(counts > 0, self.margin * counts.clamp_min(1) ** -0.25, 1e9)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
