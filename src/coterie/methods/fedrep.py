"""Clients share the encoder and keep personal heads; each round trains the head first, then the encoder.

Liam Collins, Hamed Hassani, Aryan Mokhtari, Sanjay Shakkottai: Exploiting Shared Representations for Personalized
Federated Learning, ICML 2021.
By default the head trains for one epoch and the encoder for the local epochs of a round; the paper uses 10 and 1, and
so do the recipes of FedPAC's tables. With another part of the network as `personal`, that part takes the head's place,
and the rest the encoder's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core import sharing
from coterie.core.batch import Batch, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, HEADS, Protections, unless
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    shared: Weights
    personal: Weights  # mean of the heads, for the global model only


class State(NamedTuple):
    personal: Weights
    personal_momentum: Tree
    shared_momentum: Tree


class Down(NamedTuple):
    shared: Weights


class Up(NamedTuple):
    shared: Weights
    personal: Weights  # empty unless heads are averaged
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedRep(Method[Server, State, Down, Up]):
    personal: str = sharing.kept("head")
    head_epochs: int = field(
        default=1, metadata={"help": "epochs of the head, which is trained before the encoder (τ)", "low": 0}
    )
    encoder_epochs: int | None = field(
        default=None, metadata={"help": "epochs of the encoder; default: local epochs", "low": 0}
    )
    average_heads: bool = field(default=False, metadata={"help": "also send heads, to evaluate a global model"})

    title: ClassVar[str] = "FedRep"
    formula: ClassVar[str] = """
        φ_i ← SGD(f_i(θ, ·); φ_i)
        θ_i = SGD(f_i(·, φ_i); θ)
        θ ← Σ_i p_i θ_i
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedRep": "pre"}
    protections: ClassVar[Protections] = {"dp-client": unless(HEADS, average_heads=False), "dp-sample": ALLOWED}
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(*sharing.parts(self.personal, model))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.shared)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        shared, personal = sharing.parts(self.personal, model)
        return State(personal, self.train.start(personal), self.train.start(shared))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(shared: Weights, personal: Weights, batch: Batch) -> Tensor:
            return model.loss(model(sharing.join(shared, personal), batch.x), batch)

        head_epochs = self.head_epochs if any(state.personal) else 0
        personal, personal_momentum = self.train.but(local_epochs=head_epochs)(
            state.personal, lambda own, batch: loss(down.shared, own, batch), data, state.personal_momentum
        )
        epochs = self.train.local_epochs if self.encoder_epochs is None else self.encoder_epochs
        shared, shared_momentum = self.train.but(local_epochs=epochs)(
            down.shared, lambda shared, batch: loss(shared, personal, batch), data, state.shared_momentum
        )
        up = Up(shared, personal if self.average_heads else sharing.NOTHING, data.samples)
        return State(personal, personal_momentum, shared_momentum), up

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        personal = average(ups.personal, ups.samples) if self.average_heads else server.personal
        return Server(average(ups.shared, ups.samples), personal)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(sharing.join(down.shared, state.personal), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor | None:
        return model(sharing.join(*server), x) if self.average_heads else None
