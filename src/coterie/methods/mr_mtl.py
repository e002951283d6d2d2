"""Clients train personal models that are regularized towards the mean of all of them.

Ken Liu, Shengyuan Hu, Steven Z. Wu, Virginia Smith: On Privacy and Personalization in Cross-Silo Federated Learning,
NeurIPS 2022.
The natural partner of differential privacy for samples: a stronger pull averages more of the noise out. The paper tunes
the pull λ for every dataset and privacy budget, and has no default; 0.1 is ours. All clients count equally, as in the
paper, where all take part in every round; under partial participation the mean is that of the participants.
A client starts from the mean at the time it joins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.losses import squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.tree import Tree


class Server(NamedTuple):
    weights: Weights  # w̄, the mean of the personal models


class State(NamedTuple):
    personal: Weights  # w_k
    momentum: Tree


class Down(NamedTuple):
    weights: Weights  # w̄


class Up(NamedTuple):
    weights: Weights  # w_k


@dataclass(frozen=True)
class MRMTL(Method[Server, State, Down, Up]):
    pull: float = field(default=0.1, metadata={"help": "pull of personal models towards their mean (λ)", "low": 0})

    title: ClassVar[str] = "MR-MTL"
    formula: ClassVar[str] = """
        v_i ← SGD(f_i(v) + λ/2 |v - w|²; v_i)
        w ← mean of v_i
    """
    family: ClassVar[str] = "regularized"
    suits: ClassVar[tuple[str, ...]] = ("few clients",)
    results: ClassVar[dict[str, str]] = {"MR-MTL": "post"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_welcome(self, server: Server) -> Tree:
        return tree.flatten(server.weights)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(tree.fill(model.start, welcome), self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:
            task = model.loss(model(w, batch.x), batch)
            return task + self.pull / 2 * squared_distance(w, down.weights) if self.pull else task  # eq. (1)

        personal, momentum = self.train(state.personal, loss, data, state.momentum)
        return State(personal, momentum), Up(personal)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(tree.average(ups.weights, torch.ones_like(clients)))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.personal, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
