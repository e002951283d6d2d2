"""The encoder is shared, heads stay with the clients; the features of the encoder as received teach the local one.

Qi, Qu, Lyu, Jia, Ye: Personalized Federated Learning with Feature Alignment via Knowledge Distillation, 2024.
As in the authors' code: the distance of features is a mean over their dimensions (the paper: a sum), encoders are
averaged by samples (the paper: evenly), and the teacher's BatchNorm uses the statistics of the batch.
PFAKD+AT is not explained in the paper. Our reading is alternating training: first the head, then the encoder; the other
one, attention transfer, is there as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.errors import unknown
from coterie.core.losses import attention_distance, cross_entropy, squared_error
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average, live

READINGS = ("none", "alternate", "attention")
MODES = ("train", "eval")
AVERAGES = ("samples", "uniform")


class Server(NamedTuple):
    encoder: Tree


class State(NamedTuple):
    head: Tree
    momentum: Tree  # of encoder and head; if alternating, of the encoder
    head_momentum: Tree  # if alternating


class Down(NamedTuple):
    encoder: Tree


class Up(NamedTuple):
    encoder: Tree
    samples: Samples  # () n_i


@dataclass(frozen=True)
class PFAKD(Method[Server, State, Down, Up]):
    distill: float = field(default=1.0, metadata={"help": "strength of the teacher's features (β); 0: FedPer"})
    at: str = field(default="none", metadata={"help": "AT of the paper: none, alternate or attention"})
    head_epochs: int = field(default=1, metadata={"help": "epochs of the head, before the encoder's, if alternating"})
    attention: float = field(default=1.0, metadata={"help": "strength of the teacher's attention (β_AT), if that"})
    teacher_mode: str = field(
        default="train",
        metadata={"help": "BatchNorm of the teacher: train (by the batch) or eval (running statistics)"},
    )
    aggregation: str = field(default="samples", metadata={"help": "encoders are averaged by samples, or uniform"})

    title: ClassVar[str] = "PFAKD"
    results: ClassVar[dict[str, str]] = {"PFAKD": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def __post_init__(self) -> None:
        for what, value, known in (
            ("reading of AT", self.at, READINGS),
            ("mode of the teacher", self.teacher_mode, MODES),
            ("aggregation", self.aggregation, AVERAGES),
        ):
            if value not in known:
                raise unknown(what, value, known)

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start.encoder)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        start = model.start
        if self.at == "alternate":
            return State(start.head, self.train.start(start.encoder), self.train.start(start.head))
        return State(start.head, self.train.start(start), {})

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(encoder: Tree, head: Tree, batch: Batch) -> Tensor:
            z, lesson = self.lesson(model, encoder, down.encoder, batch.x)
            return cross_entropy(model.logits(head, z), batch.y) + lesson  # eq. (2)

        if self.at == "alternate":
            head, head_momentum = self.train.but(local_epochs=self.head_epochs)(
                state.head,
                lambda head, batch: cross_entropy(model(Weights(down.encoder, head), batch.x), batch.y),
                data,
                state.head_momentum,
            )
            encoder, momentum = self.train(
                down.encoder, lambda encoder, batch: loss(encoder, head, batch), data, state.momentum
            )
            return State(head, momentum, head_momentum), Up(encoder, data.samples)

        (encoder, head), momentum = self.train(
            Weights(down.encoder, state.head), lambda w, batch: loss(*w, batch), data, state.momentum
        )
        return State(head, momentum, {}), Up(encoder, data.samples)

    def lesson(self, model: Model, encoder: Tree, received: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, d) features, and (B,) how far they are from the teacher's."""
        teacher = live(received) if self.teacher_mode == "train" else received
        if self.at != "attention":
            z = model.features(encoder, x)
            return z, self.distill * squared_error(z, model.features(teacher, x))  # eq. (3)
        (maps, z), (shown, target) = model.maps(encoder, x), model.maps(teacher, x)
        return z, self.distill * squared_error(z, target) + self.attention * attention_distance(maps, shown)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        weights = ups.samples if self.aggregation == "samples" else torch.ones_like(ups.samples)
        return Server(average(ups.encoder, weights))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(Weights(down.encoder, state.head), x)
