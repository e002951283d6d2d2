"""Each client trains alone on its own data: the baseline that a federation must beat.

No paper. As in FedPAC's experiments (ICLR 2023, appendix B), all clients start from the same weights and the optimizer
is reset every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, NOTHING_SENT, Protections, refused, robust
from coterie.core.tree import Tree


class Server(NamedTuple):
    pass


class State(NamedTuple):
    weights: Weights
    momentum: Tree


class Down(NamedTuple):
    pass


class Up(NamedTuple):
    pass


@dataclass(frozen=True)
class Local(Method[Server, State, Down, Up]):
    title: ClassVar[str] = "Local"
    formula: ClassVar[str] = "w_i ← SGD(f_i; w_i)"
    family: ClassVar[str] = "personal layers"
    results: ClassVar[dict[str, str]] = {"Local": "post"}
    protections: ClassVar[Protections] = {
        **robust(refused(NOTHING_SENT)),
        "dp-client": refused(f"{NOTHING_SENT}, so nothing can leak"),
        "dp-sample": ALLOWED,
    }

    def server_init(self, model: Model, census: Census) -> Server:
        return Server()

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down()

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        trained = self.train(state.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum)
        return State(*trained), Up()

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return server

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)
