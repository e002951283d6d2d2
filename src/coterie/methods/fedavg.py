"""Clients train a shared model and the server averages it; FedAvg-FT then fine-tunes it on each client.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise {Agüera y Arcas}: Communication-Efficient Learning of
Deep Networks from Decentralized Data, AISTATS 2017.
FedAvg-FT follows FedPAC (ICLR 2023): each client fine-tunes the whole model for as many epochs as in a round. Both come
from one run: fine-tuning runs once, on a copy, after the last round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    momentum: Tree
    tuned: Weights | tuple[()]  # after the last round: the fine-tuned model


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedAvg(Method[Server, State, Down, Up]):
    title: ClassVar[str] = "FedAvg"
    formula: ClassVar[str] = """
        w_i = SGD(f_i; w)
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "global model"
    results: ClassVar[dict[str, str]] = {"FedAvg": "pre", "FedAvg-FT": "finished"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start), tuned=())

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum, tuned=()), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        trained, up = self.client_train(model, state, down, data)
        return State(trained.momentum, tuned=up.weights)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.tuned or down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
