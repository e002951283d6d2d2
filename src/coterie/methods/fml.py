"""Each client trains a personal model and a shared one that learn from each other; only the shared one is averaged.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu: Federated Mutual
Learning, arXiv 2020 (2006.16765).
Personal and shared model have one architecture and one start here (the paper: any). Both take a step on every batch at
once, each with the other's output before the step as a constant. The shared model is averaged by samples. α and β are
those of the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.losses import kl_divergence
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Mutual(NamedTuple):
    personal: Weights
    shared: Weights  # the meme model


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    weights: Weights  # the personal model
    momentum: Tree


class Down(NamedTuple):
    shared: Weights


class Up(NamedTuple):
    shared: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FML(Method[Server, State, Down, Up]):
    personal_share: float = field(
        default=0.5,
        metadata={"help": "share of labels in the personal model's loss (α); 1: no distillation", "low": 0, "high": 1},
    )
    shared_share: float = field(
        default=0.5,
        metadata={"help": "share of labels in the shared model's loss (β); 1: no distillation", "low": 0, "high": 1},
    )

    title: ClassVar[str] = "FML"
    formula: ClassVar[str] = """
        v_i ← SGD(α ℓ(v) + (1 - α) KL(w' ‖ v); v_i)
        w_i = SGD(β ℓ(w') + (1 - β) KL(v ‖ w'); w), both at once
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "regularized"
    results: ClassVar[dict[str, str]] = {"FML": "post"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    needs_classes: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, self.train.start(Mutual(model.start, model.start)))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(pair: Mutual, batch: Batch) -> Tensor:
            personal, shared = model(pair.personal, batch.x), model(pair.shared, batch.x)
            a, b = self.personal_share, self.shared_share
            own = a * model.loss(personal, batch) + (1 - a) * kl_divergence(personal, shared.detach())
            meme = b * model.loss(shared, batch) + (1 - b) * kl_divergence(shared, personal.detach())
            return own + meme  # each depends on one of the models

        pair, momentum = self.train(Mutual(state.weights, down.shared), loss, data, state.momentum)
        return State(pair.personal, momentum), Up(pair.shared, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.shared, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
