"""FedAvg, and for each client a personal model that is regularized towards the shared one.

Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith: Ditto: Fair and Robust Federated Learning Through Personalization,
ICML 2021.
The personal model is pulled towards the shared model as received, not as trained by the client.
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
    weights: Weights  # v_i, the personal model
    momentum: Tree
    shared_momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class Ditto(Method[Server, State, Down, Up]):
    pull: float = field(
        default=1.0, metadata={"help": "pull of the personal model towards the shared one (λ)", "low": 0}
    )
    personal_epochs: int | None = field(
        default=None, metadata={"help": "epochs of the personal model; default: local epochs", "low": 0}
    )

    title: ClassVar[str] = "Ditto"
    formula: ClassVar[str] = """
        v_i ← SGD(f_i(v) + λ/2 |v - w|²; v_i)
        w_i = SGD(f_i; w),  w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "regularized"
    results: ClassVar[dict[str, str]] = {"Ditto": "post"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        momentum = self.train.start(model.start)
        return State(model.start, momentum, momentum)

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:
            return model.loss(model(w, batch.x), batch)

        def personal_loss(v: Weights, batch: Batch) -> Tensor:
            if not self.pull:
                return loss(v, batch)
            return loss(v, batch) + self.pull / 2 * squared_distance(v, down.weights)  # eq. (1), h_k

        epochs = self.train.local_epochs if self.personal_epochs is None else self.personal_epochs
        shared, shared_momentum = self.train(down.weights, loss, data, state.shared_momentum)
        personal, momentum = self.train.but(local_epochs=epochs)(state.weights, personal_loss, data, state.momentum)
        return State(personal, momentum, shared_momentum), Up(shared, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
