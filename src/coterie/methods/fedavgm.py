"""FedAvg whose server moves with momentum.

Tzu-Ming Harry Hsu, Hang Qi, Matthew Brown: Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification, arXiv 2019 (1909.06335).
The paper searches the momentum between 0 and 0.997; the server's learning rate is 1. BatchNorm's running statistics are
averaged, without momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree


class Server(NamedTuple):  # what the server remembers
    weights: Weights
    speed: Tree  # v, for trained parameters


class State(NamedTuple):  # what a client remembers
    momentum: Tree


class Down(NamedTuple):  # server -> client
    weights: Weights


class Up(NamedTuple):  # client -> server
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedAvgM(Method[Server, State, Down, Up]):
    inertia: float = field(default=0.9, metadata={"help": "momentum of the server (β)", "low": 0, "below": 1})

    title: ClassVar[str] = "FedAvgM"
    formula: ClassVar[str] = """
        w_i = SGD(f_i; w)
        v ← β v + w - Σ_i p_i w_i
        w ← w - v
    """
    family: ClassVar[str] = "server optimizer"
    results: ClassVar[dict[str, str]] = {"FedAvgM": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start, tree.apply(torch.zeros_like, tree.trained(model.start)))

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
        change = tree.apply(torch.sub, before, tree.trained(mean))  # Δw
        speed = tree.apply(lambda v, d: self.inertia * v + d, server.speed, change)
        moved = tree.apply(torch.sub, before, speed)
        return Server(tree.fill(mean, tree.flatten(mean) | moved), speed)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
