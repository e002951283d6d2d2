"""A slowly changing shared head trains the encoder; each client's personal head then guides the shared one.

Wenzhong Wang, Zaipeng Xie, Bingzhe Yu, Zhihao Qu, Yufeng Zhang, Hongli Cao: Federated Learning with Common
Representation Learning Criterion and Personalized Predictor, IEEE SMC 2023.
One run gives both results: FedCRC is the global model, FedCRC-Per the personal models.
The paper does not state the epochs of the two heads (here: those of a round) and the weight of the guide (here: 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.losses import kl_divergence
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree


class Server(NamedTuple):
    encoder: Tree  # f
    head: Tree  # h_g


class State(NamedTuple):
    head: Tree  # h_i, the personal head
    encoder_momentum: Tree
    head_momentum: Tree
    shared_momentum: Tree


class Down(NamedTuple):
    encoder: Tree
    head: Tree  # h_g


class Up(NamedTuple):
    encoder: Tree
    head: Tree  # h_g as trained by this client
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedCRC(Method[Server, State, Down, Up]):
    inertia: float = field(
        default=0.99, metadata={"help": "share of the old shared head that is kept in a round (τ)", "low": 0, "high": 1}
    )
    encoder_epochs: int | None = field(
        default=None, metadata={"help": "epochs of the encoder (e_f); default: local epochs", "low": 0}
    )
    personal_epochs: int | None = field(
        default=None, metadata={"help": "epochs of the personal head (e_p); default: local epochs", "low": 0}
    )
    shared_epochs: int | None = field(
        default=None, metadata={"help": "epochs of the shared head (e_g); default: local epochs", "low": 0}
    )

    title: ClassVar[str] = "FedCRC"
    formula: ClassVar[str] = """
        θ_i = SGD(f_i(·, φ); θ),  φ_i ← SGD(f_i(θ_i, ·); φ_i)
        φ_i' = SGD(f_i(θ_i, ·) + KL(φ_i(z) ‖ ·(z)); φ)
        θ ← Σ_i p_i θ_i,  φ ← τ φ + (1 - τ) Σ_i p_i φ_i'
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedCRC": "global", "FedCRC-Per": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    needs_classes: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(*model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder, server.head)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        head_momentum = self.train.start(model.start.head)
        return State(model.start.head, self.train.start(model.start.encoder), head_momentum, head_momentum)

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def encoder_loss(encoder: Tree, batch: Batch) -> Tensor:
            return model.loss(model(Weights(encoder, down.head), batch.x), batch)  # eq. (4)

        def personal_loss(head: Tree, batch: Batch) -> Tensor:
            return model.loss(model(Weights(encoder, head), batch.x), batch)  # eq. (5)

        def shared_loss(head: Tree, batch: Batch) -> Tensor:
            z = model.features(encoder, batch.x)
            logits, guide = model.logits(head, z), model.logits(own, z)
            return model.loss(logits, batch) + kl_divergence(logits, guide)  # eq. (7)

        encoder, encoder_momentum = self.during(self.encoder_epochs)(
            down.encoder, encoder_loss, data, state.encoder_momentum
        )
        own, head_momentum = self.during(self.personal_epochs)(state.head, personal_loss, data, state.head_momentum)
        shared, shared_momentum = self.during(self.shared_epochs)(down.head, shared_loss, data, state.shared_momentum)
        return State(own, encoder_momentum, head_momentum, shared_momentum), Up(encoder, shared, data.samples)

    def during(self, epochs: int | None) -> LocalTraining:
        return self.train if epochs is None else self.train.but(local_epochs=epochs)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        head = tree.average(ups.head, ups.samples)  # eq. (8)
        steady = tree.apply(lambda old, new: self.inertia * old + (1 - self.inertia) * new, server.head, head)  # (9)
        return Server(tree.average(ups.encoder, ups.samples), steady)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(Weights(down.encoder, state.head), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(Weights(*server), x)
