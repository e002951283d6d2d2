"""Clients share the head and keep personal encoders, the reverse of FedPer.

Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy P. Auerbach, David Brent, Ruslan Salakhutdinov,
Louis-Philippe Morency: Think Locally, Act Globally: Federated Learning with Local and Global Representations,
arXiv 2020 (2001.01523).
As in FedPAC's comparison, training starts from scratch (the authors: from a model trained by FedAvg), and heads are
averaged by samples (the authors: uniformly). The authors keep the first layers and share the others: name those that
stay in `personal`.
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
    momentum: Tree  # of both parts


class Down(NamedTuple):
    shared: Weights


class Up(NamedTuple):
    shared: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class LGFedAvg(Method[Server, State, Down, Up]):
    personal: str = sharing.kept("encoder")

    title: ClassVar[str] = "LG-FedAvg"
    formula: ClassVar[str] = """
        (θ_i, φ_i) ← SGD(f_i; θ_i, φ)
        φ ← Σ_i p_i φ_i
    """
    family: ClassVar[str] = "personal layers"
    suits: ClassVar[tuple[str, ...]] = ("feature shift",)
    results: ClassVar[dict[str, str]] = {"LG-FedAvg": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    needs_head: ClassVar[bool] = True

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
