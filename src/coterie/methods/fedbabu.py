"""Clients train and share only the encoder, under a fixed initial head; each client fine-tunes at the end.

Jaehoon Oh, Sangmook Kim, Se-Young Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification,
ICLR 2022.
The whole model is fine-tuned by default, as in the paper; `finetune` selects a part. The comparisons of other papers
fine-tune other parts: FedReG's protocol the head, and the recipes of FedPAC's tables the encoder.
During training the head is not in the tree that is trained, so weight decay does not change it either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Data
from coterie.core.errors import unknown
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average

PARTS = ("full", "encoder", "head", "none")


class Server(NamedTuple):
    encoder: Tree


class State(NamedTuple):
    momentum: Tree
    tuned: Weights | tuple[()]  # after the last round: the fine-tuned model


class Down(NamedTuple):
    encoder: Tree


class Up(NamedTuple):
    encoder: Tree
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedBABU(Method[Server, State, Down, Up]):
    finetune: str = field(
        default="full", metadata={"help": "what clients fine-tune at the end: full, encoder, head or none"}
    )
    finetune_epochs: int | None = field(
        default=None, metadata={"help": "epochs of fine-tuning; default: local epochs", "low": 0}
    )

    title: ClassVar[str] = "FedBABU"
    formula: ClassVar[str] = """
        θ_i = SGD(f_i(·, φ₀); θ)
        θ ← Σ_i p_i θ_i
        after the last round: w_i = SGD(f_i; θ, φ₀)
    """
    family: ClassVar[str] = "fine-tuning"
    suits: ClassVar[tuple[str, ...]] = ("label shift", "new clients")
    results: ClassVar[dict[str, str]] = {"FedBABU": "finished"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    needs_encoder: ClassVar[bool] = True
    personal_is_global: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.finetune not in PARTS:
            raise unknown("part to fine-tune", self.finetune, PARTS)

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start.encoder)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start.encoder), tuned=())

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        head = model.start.head  # φ_0
        encoder, momentum = self.train(
            down.encoder,
            lambda encoder, batch: model.loss(model(Weights(encoder, head), batch.x), batch),
            data,
            state.momentum,
        )
        return State(momentum, tuned=()), Up(encoder, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.encoder, ups.samples))

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        train = self.train if self.finetune_epochs is None else self.train.but(local_epochs=self.finetune_epochs)
        received = Weights(down.encoder, model.start.head)
        moving = {
            "full": received._asdict(),
            "encoder": {"encoder": received.encoder},
            "head": {"head": received.head},
            "none": {},
        }[self.finetune]
        if not moving:
            return state
        moved, _ = train(
            moving,
            lambda parts, batch: model.loss(model(received._replace(**parts), batch.x), batch),
            data,
            {},
        )
        return State(state.momentum, received._replace(**moved))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.tuned or Weights(down.encoder, model.start.head), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(Weights(server.encoder, model.start.head), x)
