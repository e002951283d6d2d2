"""FedAvg with a proximal term that keeps each client's model close to the one it received.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith: Federated Optimization in
Heterogeneous Networks, MLSys 2020.
Every client trains for the same number of epochs. The proximal term is part of the loss, so momentum and weight decay
work as in any other method.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.losses import squared_distance
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
    weights: Weights  # w^t


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedProx(Method[Server, State, Down, Up]):
    pull: float = field(default=0.01, metadata={"help": "pull towards the received model (μ)", "low": 0})

    title: ClassVar[str] = "FedProx"
    formula: ClassVar[str] = """
        w_i = SGD(f_i(w') + μ/2 |w' - w|²; w)
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "global model"
    results: ClassVar[dict[str, str]] = {"FedProx": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:
            task = model.loss(model(w, batch.x), batch)
            return task + self.pull / 2 * squared_distance(w, down.weights) if self.pull else task  # eq. (2)

        weights, momentum = self.train(down.weights, loss, data, state.momentum)
        return State(momentum), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
