"""Each client keeps a moving average of its trained models, which predicts for it and supervises its next training.

Xin-Chun Li, De-Chuan Zhan, Yunfeng Shao, Bingshuai Li, Shaoming Song: FedPHP: Federated Personalization with Inherited
Private Models, ECML PKDD 2021.
The inherited model supervises by the features of a batch (multi-kernel MMD, as in the authors' code: five RBF kernels
around the mean squared distance) or by its softened outputs. A client has no inherited model before its first training,
so that one is FedAvg's, and the received model predicts until then. The paper grows the share of the inherited model
linearly up to μ over the trainings that a client will have had at the end; `growth` is that number: 100 for the
authors' 1000 rounds of a tenth of the clients. μ and λ are those of their code. With differential privacy for samples,
each sample is a batch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.tree import Tree

TRANSFERS = ("features", "outputs")
KERNELS = 5  # bandwidths: the mean squared distance times 1/4, 1/2, 1, 2, 4
TEMPERATURE = 4.0  # of the inherited model's outputs


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    inherited: Weights  # the inherited private model (HPM)
    trainings: Tensor  # () of this client so far
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedPHP(Method[Server, State, Down, Up]):
    inherit: float = field(
        default=0.9, metadata={"help": "largest share of the past in the inherited model (μ)", "low": 0, "below": 1}
    )
    growth: int = field(
        default=100, metadata={"help": "trainings of a client until that share is the largest", "low": 1}
    )
    transfer: float = field(
        default=0.1,
        metadata={"help": "weight of the supervision by the inherited model in the loss (λ)", "low": 0, "below": 1},
    )
    by: str = field(default="features", metadata={"help": "what the inherited model supervises: features or outputs"})

    title: ClassVar[str] = "FedPHP"
    formula: ClassVar[str] = """
        w_i = SGD((1 - λ) f_i + λ MMD²(z, z of v_i); w)
        v_i ← μ_t v_i + (1 - μ_t) w_i
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "regularized"
    results: ClassVar[dict[str, str]] = {"FedPHP": "post"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def __post_init__(self) -> None:
        if self.by not in TRANSFERS:
            raise unknown("transfer", self.by, TRANSFERS)

    def server_init(self, model: Model, census: Census) -> Server:
        if self.by == "outputs" and not model.task.one_class:
            raise CoterieError("FedPHP with by=outputs needs one class per sample; use by=features")
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, model.mean.new_zeros(()), self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        share = self.transfer * (state.trainings > 0).to(data.rate.dtype)  # λ

        def loss(w: Weights, batch: Batch) -> Tensor:
            z = model.features(w.encoder, batch.x)
            logits = model.logits(w.head, z)
            task = model.loss(logits, batch)
            if not self.transfer:
                return task
            past = model.features(state.inherited.encoder, batch.x)
            if self.by == "features":
                taught = discrepancy(z.flatten(1), past.flatten(1), batch.real)  # () of the whole batch
            else:
                soft = (model.logits(state.inherited.head, past) / TEMPERATURE).softmax(1)
                taught = -(soft * F.log_softmax(logits, 1)).sum(1)  # (B,)
            return (1 - share) * task + share * taught

        weights, momentum = self.train(down.weights, loss, data, state.momentum)
        kept = self.inherit * (state.trainings / self.growth).clamp_max(1)  # μ_t
        inherited = tree.apply(lambda past, new: kept * past + (1 - kept) * new, state.inherited, weights)
        return State(inherited, state.trainings + 1, momentum), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(tree.average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(tree.where(state.trainings > 0, state.inherited, down.weights), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)


def discrepancy(z: Tensor, target: Tensor, real: Tensor | None) -> Tensor:
    """() squared MMD between the real rows of z (B, d) and of target (B, d)."""
    rows = torch.cat([z, target])
    distances = (rows[:, None] - rows).square().sum(2)  # (2B, 2B); exactly 0 for equal rows
    count = rows.new_ones(len(rows)) if real is None else torch.cat([real, real]).to(z.dtype)
    pairs = count[:, None] * count  # 1 where both rows are real
    n = count.sum()
    mean = (pairs * distances.detach()).sum() / (n * n - n).clamp_min(1)
    width = mean.clamp_min(1e-30)  # all rows equal: every kernel is 1, and its slope 0
    kernel = torch.stack([(-distances / (width * 2.0**p)).exp() for p in range(-(KERNELS // 2), KERNELS // 2 + 1)])
    sign = torch.cat([torch.ones_like(count[: len(z)]), -torch.ones_like(count[: len(z)])])
    return (kernel.sum(0) * pairs * (sign[:, None] * sign)).sum() / (n / 2).clamp_min(1).square()
