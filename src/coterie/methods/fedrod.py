"""A shared encoder has two heads: a shared one, trained with balanced softmax, and a personal one added to it.

Hong-You Chen, Wei-Lun Chao: On Bridging Generic and Personalized Federated Learning for Image Classification,
ICLR 2022.
The personal head is linear. The balanced softmax of a client leaves out the classes that it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.losses import balanced_cross_entropy
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections, unless
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    head: Tree  # φ_P, the personal head
    momentum: Tree  # of everything, shared and personal


class Down(NamedTuple):
    weights: Weights  # θ and φ_G, the shared head


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


class Parts(NamedTuple):
    """The shared model and the personal head, trained together."""

    weights: Weights
    head: Tree


@dataclass(frozen=True)
class FedRoD(Method[Server, State, Down, Up]):
    balance: float = field(
        default=1.0, metadata={"help": "strength of the class prior in the shared head's loss (γ); 0: off", "low": 0}
    )

    title: ClassVar[str] = "Fed-RoD"
    formula: ClassVar[str] = """
        -log n_y e^{u_y} / Σ_k n_k e^{u_k},  u = φ(z), trains θ and φ
        ℓ(φ(z) + φ_i(z), y) trains φ_i
        (θ, φ) ← Σ_i p_i (θ_i, φ of client i)
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"Fed-RoD": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": ALLOWED,
        "dp-sample": unless("a client's class counts enter its loss, without noise", balance=0.0),
    }
    needs_classes: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        head = model.start.head
        return State(head, self.train.start(Parts(model.start, head)))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        counts = data.counts  # (K,)

        def loss(parts: Parts, batch: Batch) -> Tensor:
            z = model.features(parts.weights.encoder, batch.x)
            shared = model.logits(parts.weights.head, z)
            generic = balanced_cross_entropy(shared, batch.y, counts, self.balance)  # moves θ and φ_G
            both = shared.detach() + model.logits(parts.head, z.detach())
            return generic + model.loss(both, batch)  # moves φ_P only, so one SGD step trains both

        parts, momentum = self.train(Parts(down.weights, state.head), loss, data, state.momentum)
        return State(parts.head, momentum), Up(parts.weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        z = model.features(down.weights.encoder, x)
        return model.logits(down.weights.head, z) + model.logits(state.head, z)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
