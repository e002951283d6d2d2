"""FedAvg whose server takes an adaptive step along the mean change: FedAdagrad, FedYogi and FedAdam.

Sashank J. Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub Konečný, Sanjiv Kumar, H. Brendan
McMahan: Adaptive Federated Optimization, ICLR 2021.
As in Algorithm 2, moments are not corrected for their start: m begins at 0 and v at τ². The name `fedadagrad` sets
`server_beta1` to 0, as the paper's experiments do, and `server_lr` to 0.1. The paper tunes the server's learning rate
for every task; the defaults are those for CIFAR-10, as Flower's reproduction of the paper lists them. Clients are
weighted by their samples, as in the paper's experiments. BatchNorm's running statistics are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.errors import unknown
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree

RULES = ("adagrad", "yogi", "adam")


class Server(NamedTuple):
    weights: Weights  # x
    first: Tree  # m, for trained parameters
    second: Tree  # v


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedOpt(Method[Server, State, Down, Up]):
    server_optimizer: str = field(default="adam", metadata={"help": f"optimizer of the server: {', '.join(RULES)}"})
    server_lr: float = field(default=0.01, metadata={"help": "learning rate of the server (η)", "low": 0})
    server_beta1: float = field(
        default=0.9, metadata={"help": "decay of the first moment on the server (β1)", "low": 0, "below": 1}
    )
    server_beta2: float = field(
        default=0.99,
        metadata={"help": "decay of the second moment on the server (β2); not used by adagrad", "low": 0, "below": 1},
    )
    server_eps: float = field(default=1e-3, metadata={"help": "degree of adaptivity (τ)", "above": 0})

    title: ClassVar[str] = "FedOpt"
    formula: ClassVar[str] = """
        w_i = SGD(f_i; w),  Δ = Σ_i p_i w_i - w
        m ← β₁ m + (1 - β₁) Δ
        v ← v + Δ²                              FedAdagrad
            v - (1 - β₂) Δ² sign(v - Δ²)        FedYogi
            β₂ v + (1 - β₂) Δ²                  FedAdam
        w ← w + η m / (√v + τ)
    """
    family: ClassVar[str] = "server optimizer"
    results: ClassVar[dict[str, str]] = {"FedOpt": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.server_optimizer not in RULES:
            raise unknown("server optimizer", self.server_optimizer, RULES)

    def server_init(self, model: Model, census: Census) -> Server:
        trained = tree.trained(model.start)
        second = tree.apply(lambda t: torch.full_like(t, self.server_eps**2), trained)
        return Server(model.start, tree.apply(torch.zeros_like, trained), second)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        mean, before = tree.average(ups.weights, ups.samples), tree.trained(server.weights)
        change = tree.apply(torch.sub, tree.trained(mean), before)  # Δ
        first = tree.apply(lambda m, d: self.server_beta1 * m + (1 - self.server_beta1) * d, server.first, change)
        second = tree.apply(self.spread, server.second, change)
        moved = tree.apply(lambda x, m, v: x + self.server_lr * m / (v.sqrt() + self.server_eps), before, first, second)
        return Server(tree.fill(mean, tree.flatten(mean) | moved), first, second)

    def spread(self, v: Tensor, change: Tensor) -> Tensor:
        """The second moment after a change."""
        square = change.square()
        if self.server_optimizer == "adagrad":
            return v + square
        if self.server_optimizer == "yogi":
            return v - (1 - self.server_beta2) * square * (v - square).sign()
        return self.server_beta2 * v + (1 - self.server_beta2) * square

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
