"""FedReG has two heads: a personal one, trained on the client's data, and a shared one, trained on a rebalanced set.

Tianyi Liu, Mingkun Yang, Qing Wang: FedReG: Recouping the Global Model in Personalized Federated Learning, 2024.
Where the paper is silent: both passes run in each local epoch, each has its own momentum, the rebalanced set is drawn
once, and the head is the last layer. The shared head is averaged by effective samples D^e (text and eq. 5; the
algorithms print D^r). The ablations (a) to (d) of its section 4.7 are `head_by`, `two_heads`, `rebalance` and
`original_pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from torch import Tensor, uint8

from coterie.core import random, tree
from coterie.core.batch import Batch, Data, Epoch
from coterie.core.errors import unknown
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import WELCOME, Protections, unless
from coterie.core.ranges import Counted, Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree
from coterie.methods.fedreg.augment import AUGMENTATIONS
from coterie.methods.fedreg.rebalance import (
    THRESHOLDS,
    Rebalanced,
    effective,
    histograms,
    rebalance,
    rebalanced_data,
    threshold,
    varied,
)

ORDERS = ("interleaved", "block")
HEAD_WEIGHTS = ("effective", "samples")


class Server(NamedTuple):
    encoder: Tree
    head: Tree  # φ_G
    threshold: Tensor  # () t, size of the rebalanced sets


class State(NamedTuple):
    head: Tree  # φ_P; empty without a second head
    rebalanced: Rebalanced | tuple[()]  # d_r
    momentum: Tree  # of the pass over the client's data
    rebalanced_momentum: Tree  # of the pass over the rebalanced set


class Down(NamedTuple):
    encoder: Tree
    head: Tree  # φ_G


class Up(NamedTuple):
    encoder: Tree
    head: Tree  # φ_G as trained by this client
    samples: Samples  # () D_o
    effective: Counted  # () D_e


class Models(NamedTuple):
    """The models of a client in training, and their momentum."""

    encoder: Tree
    shared: Tree  # head
    own: Tree  # head
    first: Tree  # momentum of passes over the client's data
    second: Tree  # momentum of passes over the rebalanced set


@dataclass(frozen=True)
class FedReG(Method[Server, State, Down, Up]):
    threshold: str = field(
        default="average", metadata={"help": "size of rebalanced sets (t): average, median, max or second-smallest"}
    )
    augmentation: str = field(default="simple", metadata={"help": "augmentation of copies: simple, auto or none"})
    flip: bool = field(
        default=True, metadata={"help": "mirror images in simple augmentation; turn off for letters and digits"}
    )
    order: str = field(
        default="interleaved", metadata={"help": "order of passes: interleaved (both in each epoch) or block"}
    )
    head_by: str = field(
        default="effective", metadata={"help": "weights of the average of shared heads: effective or samples"}
    )
    two_heads: bool = field(default=True, metadata={"help": "train a personal head in addition to the shared one"})
    rebalance: bool = field(
        default=True, metadata={"help": "second pass over the rebalanced set; otherwise over the data again"}
    )
    original_pass: bool = field(default=True, metadata={"help": "first pass over the client's data"})

    title: ClassVar[str] = "FedReG"
    formula: ClassVar[str] = """
        ℓ(φ(z) + φ_i(z), y) on the client's samples trains θ and φ_i
        ℓ(φ(z), y) on a rebalanced set trains θ and φ
        θ ← Σ_i p_i θ_i,  φ ← Σ_i e_i φ of client i / Σ_i e_i,  e_i: effective samples
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedReG": "pre"}
    needs_classes: ClassVar[bool] = True
    protections: ClassVar[Protections] = {
        "dp-client": unless(WELCOME, rebalance=False),
        "dp-sample": unless(
            "a rebalanced set holds several copies of a sample, so one sample has several gradients in a step",
            rebalance=False,
        ),
    }

    def __post_init__(self) -> None:
        for what, value, known in (
            ("threshold", self.threshold, THRESHOLDS),
            ("augmentation", self.augmentation, AUGMENTATIONS),
            ("order of passes", self.order, ORDERS),
            ("weight of heads", self.head_by, HEAD_WEIGHTS),
        ):
            if value not in known:
                raise unknown(what, value, known)

    @property
    def personal(self) -> bool:
        return self.two_heads and self.original_pass

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(*model.start, threshold(census.samples, self.threshold))

    def server_welcome(self, server: Server) -> Tree:
        return {"threshold": server.threshold} if self.rebalance else {}

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder, server.head)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        chosen = rebalance(data, int(welcome["threshold"])) if self.rebalance else ()
        momentum = self.train.start(model.start)
        return State(
            model.start.head if self.personal else {}, chosen, momentum if self.original_pass else {}, momentum
        )

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        chosen = state.rebalanced
        if isinstance(chosen, Rebalanced):
            balanced = rebalanced_data(data, chosen, self.augmentation, self.flip)
            share = effective(chosen).to(data.rate.dtype)
        else:
            balanced, share = replace(data, key=random.derive(data.key, random.REBALANCE)), data.samples

        def loss(w: Weights, batch: Batch) -> Tensor:
            return model.loss(model(w, batch.x), batch)

        def step_on_balanced(m: Models, batch: Batch) -> Models:
            (encoder, shared), second = self.train.step(Weights(m.encoder, m.shared), loss, batch, data.rate, m.second)
            return m._replace(encoder=encoder, shared=shared, second=second)

        def step_on_original(m: Models, batch: Batch) -> Models:
            (encoder, shared), first = self.train.step(Weights(m.encoder, m.shared), loss, batch, data.rate, m.first)
            return m._replace(encoder=encoder, shared=shared, first=first)

        def step_on_both_heads(m: Models, batch: Batch) -> Models:
            def personal_loss(w: Weights, batch: Batch) -> Tensor:
                z = model.features(w.encoder, batch.x)
                return model.loss(model.logits(m.shared, z) + model.logits(w.head, z), batch)

            (encoder, own), first = self.train.step(Weights(m.encoder, m.own), personal_loss, batch, data.rate, m.first)
            return m._replace(encoder=encoder, own=own, first=first)

        def work() -> Iterator[tuple[Callable[[Models, Batch], Models], Epoch]]:
            for original, epoch in self.passes():
                samples = data if original else balanced
                samples = replace(samples, key=random.derive(samples.key, epoch))
                step = (step_on_both_heads if self.two_heads else step_on_original) if original else step_on_balanced
                for run in self.train.but(local_epochs=1).runs(samples):
                    yield step, run

        before = Models(down.encoder, down.head, state.head, state.momentum, state.rebalanced_momentum)
        encoder, shared, own, *momenta = fold(before, work())
        kept = momenta if self.train.keep_momentum else ({}, {})
        return State(own, chosen, *kept), Up(encoder, shared, data.samples, share)

    def passes(self) -> list[tuple[bool, int]]:
        """The passes of local training: whether over the client's own data, and the epoch."""
        kinds, epochs = (True, False) if self.original_pass else (False,), range(self.train.local_epochs)
        if self.order == "block":
            return [(original, epoch) for original in kinds for epoch in epochs]
        return [(original, epoch) for epoch in epochs for original in kinds]

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        encoder = tree.average(ups.encoder, ups.samples)  # eq. (4)
        head = tree.average(ups.head, ups.effective if self.head_by == "effective" else ups.samples)  # eq. (5)
        return Server(encoder, head, server.threshold)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        z = model.features(down.encoder, x)
        shared = model.logits(down.head, z)
        return shared + model.logits(state.head, z) if self.personal else shared

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(Weights(server.encoder, server.head), x)

    def training_classes(self, class_counts: Tensor) -> Tensor | None:
        return histograms(class_counts, self.threshold).after if self.rebalance else None

    def augmentations(self, x: Tensor, key: Tensor) -> dict[str, Tensor]:
        kinds = [kind for kind in AUGMENTATIONS if kind != "none" and (kind != "auto" or x.dtype == uint8)]
        return {kind: varied(x, key, kind, self.flip) for kind in kinds}
