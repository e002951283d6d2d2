"""Clients share the encoder and keep personal heads; both are trained together.

Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh, Sunav Choudhary: Federated Learning with Personalization
Layers, arXiv 2019 (1912.00818).
Without `keep_head`, trained heads are discarded after every round, as FedCRC's comparison seems to have done. With
another part of the network as `personal`, that part takes the head's place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core import sharing
from coterie.core.batch import Data
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
    momentum: Tree


class Down(NamedTuple):
    shared: Weights


class Up(NamedTuple):
    shared: Weights
    personal: Weights  # empty unless heads are averaged
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedPer(Method[Server, State, Down, Up]):
    personal: str = sharing.kept("head")
    keep_head: bool = field(default=True, metadata={"help": "keep trained heads; otherwise they are reset every round"})
    average_heads: bool = field(default=False, metadata={"help": "also send heads, to evaluate a global model"})

    title: ClassVar[str] = "FedPer"
    formula: ClassVar[str] = """
        (θ_i, φ_i) ← SGD(f_i; θ, φ_i)
        θ ← Σ_i p_i θ_i
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedPer": "pre"}
    protections: ClassVar[Protections] = {"dp-client": unless(HEADS, average_heads=False), "dp-sample": ALLOWED}
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(*sharing.parts(self.personal, model))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.shared)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(sharing.parts(self.personal, model).personal, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            sharing.join(down.shared, state.personal),
            lambda w, batch: model.loss(model(w, batch.x), batch),
            data,
            state.momentum,
        )
        shared, trained = sharing.parts(self.personal, model, weights)
        kept = trained if self.keep_head else sharing.parts(self.personal, model).personal
        return State(kept, momentum), Up(shared, trained if self.average_heads else sharing.NOTHING, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        personal = average(ups.personal, ups.samples) if self.average_heads else server.personal
        return Server(average(ups.shared, ups.samples), personal)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(sharing.join(down.shared, state.personal), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor | None:
        return model(sharing.join(*server), x) if self.average_heads else None
