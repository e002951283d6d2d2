"""Clients share the encoder and keep personal heads; each round trains the head first, then the encoder.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021. By default the head trains for one epoch and the encoder for the local epochs of a round; the paper uses 10
and 1, and so do the recipes of FedPAC's tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, HEADS, Protections, unless
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    encoder: Tree
    head: Tree  # mean of the heads, for the global model only


class State(NamedTuple):
    head: Tree
    head_momentum: Tree
    encoder_momentum: Tree


class Down(NamedTuple):
    encoder: Tree


class Up(NamedTuple):
    encoder: Tree
    head: Tree  # empty unless heads are averaged
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedRep(Method[Server, State, Down, Up]):
    head_epochs: int = field(
        default=1, metadata={"help": "epochs of the head, which is trained before the encoder (τ)", "low": 0}
    )
    encoder_epochs: int | None = field(
        default=None, metadata={"help": "epochs of the encoder; default: local epochs", "low": 0}
    )
    average_heads: bool = field(default=False, metadata={"help": "also send heads, to evaluate a global model"})

    title: ClassVar[str] = "FedRep"
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedRep": "pre"}
    protections: ClassVar[Protections] = {"dp-client": unless(HEADS, average_heads=False), "dp-sample": ALLOWED}
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(*model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        start = model.start
        return State(start.head, self.train.start(start.head), self.train.start(start.encoder))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(encoder: Tree, head: Tree, batch: Batch) -> Tensor:
            return model.loss(model(Weights(encoder, head), batch.x), batch)

        head, head_momentum = self.train.but(local_epochs=self.head_epochs)(
            state.head, lambda head, batch: loss(down.encoder, head, batch), data, state.head_momentum
        )
        epochs = self.train.local_epochs if self.encoder_epochs is None else self.encoder_epochs
        encoder, encoder_momentum = self.train.but(local_epochs=epochs)(
            down.encoder, lambda encoder, batch: loss(encoder, head, batch), data, state.encoder_momentum
        )
        up = Up(encoder, head if self.average_heads else {}, data.samples)
        return State(head, head_momentum, encoder_momentum), up

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        head = average(ups.head, ups.samples) if self.average_heads else server.head
        return Server(average(ups.encoder, ups.samples), head)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(Weights(down.encoder, state.head), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor | None:
        return model(Weights(*server), x) if self.average_heads else None
