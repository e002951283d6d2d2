"""FedAvg with distillation from the received model, on the classes other than the true one.

Gihun Lee, Minchan Jeong, Yongjin Shin, Sangmin Bae, Se-Young Yun: Preservation of the Global Knowledge by Not-True
Distillation in Federated Learning, NeurIPS 2022.
The teacher is the global model as received, in evaluation mode. As in the paper's equation, the distillation loss is
not multiplied by the squared temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.losses import kl_divergence
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights  # w^g, the teacher


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedNTD(Method[Server, State, Down, Up]):
    distill: float = field(
        default=1.0, metadata={"help": "strength of the distillation (β); 0 switches it off", "low": 0}
    )
    temperature: float = field(default=1.0, metadata={"help": "temperature of the distillation (τ)", "above": 0})

    title: ClassVar[str] = "FedNTD"
    formula: ClassVar[str] = """
        w_i = SGD(f_i + β KL(q of w ‖ q); w),  q_k ∝ e^{u_k / τ} over the classes k ≠ y
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "global model"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedNTD": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:
            logits = model(w, batch.x)
            task = model.loss(logits, batch)
            if not self.distill:
                return task
            true = batch.y[:, None] == torch.arange(data.classes, device=batch.y.device)  # (B, K)
            student, teacher = (
                torch.where(true, -1e9, u / self.temperature) for u in (logits, model(down.weights, batch.x))
            )  # finite: 0 times infinity would be nan
            return task + self.distill * kl_divergence(student, teacher)

        weights, momentum = self.train(down.weights, loss, data, state.momentum)
        return State(momentum), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
