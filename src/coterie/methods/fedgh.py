"""Clients keep their encoders; the server trains one head for all on the class means of their features.

Liping Yi, Gang Wang, Xiaoguang Liu, Zhuan Shi, Han Yu: FedGH: Heterogeneous Federated Learning with Generalized Global
Header, ACM MM 2023.
All encoders have one architecture here. The server takes one step on each class mean (`server_batch` 1), in random
order (the paper: client by client). Class means are computed in a separate pass after training. A client's model is its
encoder with the server's head, as after a download; `own_head` predicts with the head that the client itself trained.
The server's learning rate is that of the authors' code, in which no optimizer holds the server's head, so that it keeps
its initial weights; here it is trained, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data, features
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import (
    ALLOWED,
    COUNTED,
    OWN_ENCODERS,
    SEND_STATISTICS,
    STATISTICS_ONLY,
    Protections,
    refused,
    robust,
)
from coterie.core.ranges import Counted
from coterie.core.statistics import class_samples, class_statistics
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree


class Server(NamedTuple):
    head: Tree  # θ
    prototypes: Tensor  # (S, K, d) class means of the last participants
    counts: Tensor  # (S, K)


class State(NamedTuple):
    encoder: Tree
    head: Tree  # as the client trained it
    momentum: Tree


class Down(NamedTuple):
    head: Tree  # θ


class Up(NamedTuple):
    prototypes: Tensor  # (K, d) class means of features
    counts: Counted  # (K,)


@dataclass(frozen=True)
class FedGH(Method[Server, State, Down, Up]):
    server_lr: float = field(default=0.01, metadata={"help": "learning rate of the server's head (η_θ)", "low": 0})
    server_epochs: int = field(default=1, metadata={"help": "epochs of the server's head per round", "low": 0})
    server_batch: int = field(default=1, metadata={"help": "class means per step of the server's head", "low": 1})
    own_head: bool = field(
        default=False, metadata={"help": "predict with the head that the client trained, not with the server's"}
    )

    title: ClassVar[str] = "FedGH"
    formula: ClassVar[str] = """
        (θ_i, ·) ← SGD(f_i; θ_i, φ)
        φ ← SGD of Σ_i Σ_k ℓ(φ(c_ik), k), from φ,  c_ik: mean of z over class k of client i
    """
    family: ClassVar[str] = "prototypes"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedGH": "pre"}
    protections: ClassVar[Protections] = {
        **robust(refused(STATISTICS_ONLY), "robust-clip"),
        "dp-client": refused(f"its server trains on the class means of every client, not on their mean; {COUNTED}"),
        "dp-sample": refused(SEND_STATISTICS),
        "dp-statistics": refused(OWN_ENCODERS),
        "dp-both": ALLOWED,
    }
    needs_classes: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        zeros = model.mean.new_zeros
        return Server(model.start.head, zeros(0, model.classes, model.dim), zeros(0, model.classes))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.head)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(*model.start, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            Weights(state.encoder, down.head),
            lambda w, batch: model.loss(model(w, batch.x), batch),
            data,
            state.momentum,
        )
        z = features(model, weights.encoder, data, epoch=self.train.local_epochs)
        found = class_statistics(z, data.y, data.classes, data.real)
        return State(*weights, momentum), Up(found.means, found.counts)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(server.head, ups.prototypes, ups.counts)

    def server_train(self, model: Model, server: Server, key: Tensor) -> Server:
        training = LocalTraining(local_epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr)

        def loss(head: Tree, batch: Batch) -> Tensor:
            return model.loss(model.logits(head, batch.x), batch)

        head, _ = training(server.head, loss, class_samples(server.prototypes, server.counts, key), {})
        return server._replace(head=head)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(Weights(state.encoder, state.head if self.own_head else down.head), x)
