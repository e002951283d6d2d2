"""Every client trains its own model; only class prototypes are shared, and features are drawn towards them.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients,
AAAI 2022; as in FedPAC's comparison (ICLR 2023, C.5), which tests the classifier, not the nearest prototype:
FedProto-G with global prototypes, FedProto-L with those the client had itself after its last training.
Prototypes of clients are averaged by class counts (the authors: uniformly), and taken in a pass of their own
after training (the authors: during the last epoch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data, features
from coterie.core.errors import unknown
from coterie.core.losses import cross_entropy, squared_error
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import NOTHING_SENT, SEND_STATISTICS, Protections, refused, robust, unless
from coterie.core.ranges import Counted
from coterie.core.statistics import class_statistics, merge_means
from coterie.core.tree import Tree

SOURCES = ("global", "local")


class Server(NamedTuple):
    prototypes: Tensor  # (K, d) c; a row of zeros: not seen yet


class State(NamedTuple):
    weights: Weights
    momentum: Tree
    prototypes: Tensor  # (K, d) c_i of the last training; a row of zeros: not seen yet


class Down(NamedTuple):
    prototypes: Tensor | tuple[()]  # (K, d) c; nothing if they are local


class Up(NamedTuple):
    prototypes: Tensor | tuple[()]  # (K, d) c_i; nothing if they are local
    counts: Counted | tuple[()]  # (K,) n_ik


@dataclass(frozen=True)
class FedProto(Method[Server, State, Down, Up]):
    prototypes: str = field(
        default="global", metadata={"help": "what features are drawn to: global prototypes, or the client's (local)"}
    )
    align: float = field(default=1.0, metadata={"help": "strength of feature alignment (λ); 0 switches it off"})

    title: ClassVar[str] = "FedProto"
    results: ClassVar[dict[str, str]] = {"FedProto": "post"}
    protections: ClassVar[Protections] = {
        "robust-clip": unless(NOTHING_SENT, prototypes="global"),
        **robust(
            refused("it sends class statistics only, in which clients without a class have zeros; take clip"),
            "robust-clip",
        ),
        "dp-client": refused(
            "its server weights every class by how many samples each client has of it, which would need noise of its "
            "own; --dp-statistics protects samples there"
        ),
        "dp-sample": refused(SEND_STATISTICS),
        "dp-statistics": refused(
            "its statistics are of an encoder that does not travel and was trained on the same samples, so noise on "
            "them alone covers little; give --dp sample too"
        ),
        "dp-both": unless("features are drawn to the client's own class means, without noise", prototypes="global"),
    }

    def __post_init__(self) -> None:
        if self.prototypes not in SOURCES:
            raise unknown("source of prototypes", self.prototypes, SOURCES)

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.mean.new_zeros(model.classes, model.dim))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.prototypes if self.prototypes == "global" else ())

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        unseen = model.mean.new_zeros(model.classes, model.dim)
        return State(model.start, self.train.start(model.start), unseen)

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        target = down.prototypes if isinstance(down.prototypes, Tensor) else state.prototypes  # (K, d)
        seen = target.any(1)  # (K,) nothing draws where there is no prototype yet

        def loss(w: Weights, batch: Batch) -> Tensor:
            z = model.features(w.encoder, batch.x)
            task = cross_entropy(model.logits(w.head, z), batch.y)
            if not self.align:
                return task
            return task + self.align * seen[batch.y] * squared_error(z, target[batch.y])

        weights, momentum = self.train(state.weights, loss, data, state.momentum)
        z = features(model, weights.encoder, data, epoch=self.train.local_epochs)
        found = class_statistics(z, data.y, data.classes, data.real)
        up = Up(found.means, found.counts) if self.prototypes == "global" else Up((), ())
        return State(weights, momentum, found.means), up

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        if not isinstance(ups.prototypes, Tensor) or not isinstance(ups.counts, Tensor):
            return server
        return Server(merge_means(ups.prototypes, ups.counts, server.prototypes))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)
