"""Clients train personal models and share only class prototypes, to which their features are aligned.

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang: FedProto: Federated Prototype
Learning across Heterogeneous Clients, AAAI 2022.
As in FedPAC's comparison (ICLR 2023, C.5), the classifier is tested, not the nearest prototype:
FedProto-G uses global prototypes, FedProto-L those of the client's own last training.
Clients' prototypes are averaged by class counts (the authors: uniformly), and computed in a separate pass after
training (the authors: during the last epoch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data, features
from coterie.core.errors import unknown
from coterie.core.losses import squared_error
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import (
    COUNTED,
    NOTHING_SENT,
    OWN_ENCODERS,
    SEND_STATISTICS,
    STATISTICS_ONLY,
    Protections,
    refused,
    robust,
    unless,
)
from coterie.core.ranges import Counted
from coterie.core.statistics import class_statistics, merge_means
from coterie.core.tree import Tree

SOURCES = ("global", "local")


class Server(NamedTuple):
    prototypes: Tensor  # (K, d) c; a zero row: class not seen yet


class State(NamedTuple):
    weights: Weights
    momentum: Tree
    prototypes: Tensor  # (K, d) c_i of the last training; a zero row: class not seen yet


class Down(NamedTuple):
    prototypes: Tensor | tuple[()]  # (K, d) c; nothing if they are local


class Up(NamedTuple):
    prototypes: Tensor | tuple[()]  # (K, d) c_i; nothing if they are local
    counts: Counted | tuple[()]  # (K,) n_ik


@dataclass(frozen=True)
class FedProto(Method[Server, State, Down, Up]):
    prototypes: str = field(
        default="global", metadata={"help": "prototypes to align features to: global, or the client's own (local)"}
    )
    align: float = field(
        default=1.0, metadata={"help": "strength of feature alignment (λ); 0 switches it off", "low": 0}
    )

    title: ClassVar[str] = "FedProto"
    formula: ClassVar[str] = """
        w_i ← SGD(f_i + λ |z - c_y|² / d; w_i)
        c_k ← Σ_i n_ik c_ik / Σ_i n_ik,  c_ik: mean of z over class k of client i
    """
    family: ClassVar[str] = "prototypes"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedProto": "post"}
    needs_classes: ClassVar[bool] = True
    protections: ClassVar[Protections] = {
        "robust-clip": unless(NOTHING_SENT, prototypes="global"),
        **robust(refused(STATISTICS_ONLY), "robust-clip"),
        "dp-client": refused(
            f"its server weights prototypes by class counts, which would need separate noise; {COUNTED}"
        ),
        "dp-sample": refused(SEND_STATISTICS),
        "dp-statistics": refused(OWN_ENCODERS),
        "dp-both": unless("features are aligned to the client's own class means, without noise", prototypes="global"),
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
        seen = target.any(1)  # (K,) classes without a prototype are not aligned

        def loss(w: Weights, batch: Batch) -> Tensor:
            z = model.features(w.encoder, batch.x)
            task = model.loss(model.logits(w.head, z), batch)
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
