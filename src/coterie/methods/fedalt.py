"""Clients share one part of the network and keep another; each round trains the personal part first, then the shared.

Krishna Pillutla, Kshitiz Malik, Abdel-Rahman Mohamed, Mike Rabbat, Maziar Sanjabi, Lin Xiao: Federated Learning with
Partial Model Personalization, ICML 2022.
By default the personal part trains for one epoch and the shared part for the local epochs of a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core import sharing
from coterie.core.batch import Batch, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    shared: Weights  # u


class State(NamedTuple):
    personal: Weights  # v_i
    personal_momentum: Tree
    shared_momentum: Tree


class Down(NamedTuple):
    shared: Weights


class Up(NamedTuple):
    shared: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedAlt(Method[Server, State, Down, Up]):
    personal: str = sharing.kept("head")
    personal_epochs: int = field(
        default=1, metadata={"help": "epochs of the personal part, which is trained before the shared one", "low": 0}
    )

    title: ClassVar[str] = "FedAlt"
    formula: ClassVar[str] = """
        v_i ← SGD(f_i(u, ·); v_i), the personal part
        u_i = SGD(f_i(·, v_i); u), the shared part
        u ← Σ_i p_i u_i
    """
    family: ClassVar[str] = "personal layers"
    suits: ClassVar[tuple[str, ...]] = ("label shift", "feature shift")
    results: ClassVar[dict[str, str]] = {"FedAlt": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(sharing.parts(self.personal, model).shared)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.shared)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        shared, personal = sharing.parts(self.personal, model)
        return State(personal, self.train.start(personal), self.train.start(shared))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(shared: Weights, personal: Weights, batch: Batch) -> Tensor:
            return model.loss(model(sharing.join(shared, personal), batch.x), batch)

        epochs = self.personal_epochs if any(state.personal) else 0
        personal, personal_momentum = self.train.but(local_epochs=epochs)(
            state.personal, lambda v, batch: loss(down.shared, v, batch), data, state.personal_momentum
        )
        shared, shared_momentum = self.train(
            down.shared, lambda u, batch: loss(u, personal, batch), data, state.shared_momentum
        )
        return State(personal, personal_momentum, shared_momentum), Up(shared, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.shared, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(sharing.join(down.shared, state.personal), x)
