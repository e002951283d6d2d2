"""Clients share the encoder and keep personal heads; the received encoder distills its features into the local one.

Guangfei Qi, Zhihao Qu, Shen-Huan Lyu, Ninghui Jia, Baoliu Ye: Personalized Federated Learning with Feature Alignment
via Knowledge Distillation, PRICAI 2024.
As in the authors' code: the distance of features is a mean over their dimensions (the paper: a sum), encoders are
averaged by samples (the paper: uniformly), and the teacher's BatchNorm uses the statistics of the batch.
The paper does not explain PFAKD+AT. Our reading is alternating training (`alternate`): first the head, then the
encoder. The other reading, attention transfer, is `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.errors import unknown
from coterie.core.losses import attention_distance, squared_error
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
    distill: float = field(default=1.0, metadata={"help": "strength of feature distillation (β); 0: FedPer", "low": 0})
    at: str = field(default="none", metadata={"help": "reading of the paper's AT: none, alternate or attention"})
    head_epochs: int = field(
        default=1,
        metadata={"help": "with alternate: epochs of the head, which is trained before the encoder", "low": 0},
    )
    attention: float = field(
        default=1.0, metadata={"help": "with attention: strength of attention transfer (β_AT)", "low": 0}
    )
    teacher_mode: str = field(
        default="train",
        metadata={"help": "BatchNorm of the teacher: train (batch statistics) or eval (running statistics)"},
    )
    aggregation: str = field(
        default="samples", metadata={"help": "weights of the encoders' average: samples or uniform"}
    )

    title: ClassVar[str] = "PFAKD"
    formula: ClassVar[str] = """
        (θ_i, φ_i) ← SGD(f_i + β |z - z of θ|² / d; θ, φ_i)
        θ ← Σ_i p_i θ_i
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"PFAKD": "pre"}
    needs_classes: ClassVar[bool] = True
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def __post_init__(self) -> None:
        for what, value, known in (
            ("reading of AT", self.at, READINGS),
            ("teacher_mode", self.teacher_mode, MODES),
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
            return model.loss(model.logits(head, z), batch) + lesson  # eq. (2)

        if self.at == "alternate":
            head, head_momentum = self.train.but(local_epochs=self.head_epochs)(
                state.head,
                lambda head, batch: model.loss(model(Weights(down.encoder, head), batch.x), batch),
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
        """(B, d) features, and (B,) their weighted distance to the teacher's."""
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
