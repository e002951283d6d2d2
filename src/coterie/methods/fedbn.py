"""FedAvg in which clients keep their normalization layers: weights and running statistics are not sent.

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp, Qi Dou: FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization, ICLR 2021.
The paper keeps BatchNorm; GroupNorm, LayerNorm and RMSNorm are kept too. `personal` names some of these
layers, or others. Shared layers are averaged by samples (the authors' code: uniformly). There is no global model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core import sharing
from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    shared: Weights


class State(NamedTuple):
    personal: Weights
    momentum: Tree


class Down(NamedTuple):
    shared: Weights


class Up(NamedTuple):
    shared: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedBN(Method[Server, State, Down, Up]):
    personal: str = sharing.kept("norm")

    title: ClassVar[str] = "FedBN"
    formula: ClassVar[str] = """
        (u_i, v_i) ← SGD(f_i; u, v_i), v_i: normalization layers
        u ← Σ_i p_i u_i
    """
    family: ClassVar[str] = "personal layers"
    suits: ClassVar[tuple[str, ...]] = ("feature shift",)
    results: ClassVar[dict[str, str]] = {"FedBN": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    needs_norm: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(sharing.parts(self.personal, model).shared)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.shared)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(sharing.parts(self.personal, model).personal, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            sharing.join(down.shared, state.personal),
            lambda w, batch: model.loss(model(w, batch.x), batch),
            data,
            state.momentum,
        )
        shared, personal = sharing.parts(self.personal, model, weights)
        return State(personal, momentum), Up(shared, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.shared, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(sharing.join(down.shared, state.personal), x)
