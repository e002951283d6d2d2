"""A policy network divides the features of each sample between a shared head and a personal one.

Jianqing Zhang, Yang Hua, Hao Wang, Tao Song, Zhengui Xue, Ruhui Ma, Haibing Guan: FedCP: Separating Feature Information
for Personalized Federated Learning via Conditional Policy, KDD 2023.
The policy turns a sample's features h and the context v of its client into shares r and 1 - r of every feature, and the
output is shared(r h) + personal((1 - r) h). The shared head is the mean of all personal ones and does not change in
local training, nor does the received encoder, whose features a kernel distance (MMD) keeps h close to. The context is
the sum over the rows of the first layer of the personal head, of length 1, as it was when the round began. As in the
paper the policy has no noise; the authors' code draws Gumbel noise, in testing too. The kernel is the sum of four
Gaussians, on the mean features of a sample that has several vectors of them. Their widths and λ are those of the
authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.errors import CoterieError
from coterie.core.init import generator, linear
from coterie.core.method import Census, Method
from coterie.core.model import Model
from coterie.core.protections import ALLOWED, Protections, refused
from coterie.core.ranges import Samples
from coterie.core.statistics import vectors
from coterie.core.tree import Tree, average

WIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the kernel


class Backbone(NamedTuple):
    encoder: Tree
    policy: Tree  # CPN, the conditional policy network


class BackboneAndHead(NamedTuple):
    shared: Backbone
    head: Tree


class Server(NamedTuple):
    shared: Backbone
    head: Tree  # the shared head


class State(NamedTuple):
    head: Tree  # the personal head
    momentum: Tree


class Down(NamedTuple):
    shared: Backbone
    head: Tree  # the shared head


class Up(NamedTuple):
    shared: Backbone
    head: Tree  # the personal head
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedCP(Method[Server, State, Down, Up]):
    align: float = field(
        default=5.0, metadata={"help": "strength of the alignment to the received encoder (λ); 0: off", "low": 0}
    )

    title: ClassVar[str] = "FedCP"
    formula: ClassVar[str] = """
        ℓ(φ(r ⊙ z) + φ_i((1 - r) ⊙ z), y) + λ MMD²(z, z of the received θ) trains θ, φ_i and the policy
        (r, 1 - r) = softmax of policy(z ⊙ v_i),  v_i: sum over the rows of φ_i, of length 1
        φ ← Σ_i p_i φ_i
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedCP": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": ALLOWED,
        "dp-sample": refused("the loss of a sample depends on the features of its whole batch"),
    }
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        context(model.start.head, model.dim)  # refuse other heads
        d, like = model.dim, model.mean
        weight, bias = linear(generator(model), d, (2 * d,), like)
        norm = {"norm.weight": like.new_ones(2 * d), "norm.bias": like.new_zeros(2 * d)}
        return Server(Backbone(model.start.encoder, {"weight": weight, "bias": bias} | norm), model.start.head)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(*server)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        d, zeros = model.dim, model.mean.new_zeros
        policy = {"weight": zeros(2 * d, d)} | {name: zeros(2 * d) for name in ("bias", "norm.weight", "norm.bias")}
        start = BackboneAndHead(Backbone(model.start.encoder, policy), model.start.head)
        return State(start.head, self.train.start(start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        v = context(state.head, model.dim)

        def loss(w: BackboneAndHead, batch: Batch) -> Tensor:
            h = model.features(w.shared.encoder, batch.x)
            shared, personal = divided(model, w.shared.policy, v, h)
            output = model.total(model.logits(down.head, shared), model.logits(w.head, personal))
            task = model.loss(output, batch)
            if not self.align:
                return task
            received = model.features(down.shared.encoder, batch.x)
            one, other = (vectors(features, model.feature_axis) for features in (h, received))
            return task + self.align * kernel_distance(one, other, batch.real)

        (shared, head), momentum = self.train(BackboneAndHead(down.shared, state.head), loss, data, state.momentum)
        return State(head, momentum), Up(shared, head, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.shared, ups.samples), average(ups.head, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        v, h = context(state.head, model.dim), model.features(down.shared.encoder, x)
        shared, personal = divided(model, down.shared.policy, v, h)
        return model.total(model.logits(down.head, shared), model.logits(state.head, personal))


def context(head: Tree, dim: int) -> Tensor:
    """(d,) v: sum over the rows of the head's first layer, of length 1."""
    found = next((t for t in head.values() if t.ndim > 1 and t.shape[1] == dim), None)
    if found is None:
        raise CoterieError(
            f"FedCP needs a head whose first layer is linear or a convolution, with weights for each of {dim} features"
        )
    return F.normalize(found.transpose(0, 1).flatten(1).sum(1), dim=0)


def divided(model: Model, policy: Tree, v: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """r ⊙ h and (1 - r) ⊙ h of features h (B, ...), whose vectors have shares of their own."""
    r = share(policy, h.movedim(model.feature_axis, -1) * v).movedim(-1, model.feature_axis)
    return r * h, (1 - r) * h


def share(policy: Tree, c: Tensor) -> Tensor:
    """(..., d) r, the share of the shared head in every feature, from c = h ⊙ v (..., d)."""
    a = F.linear(c, policy["weight"], policy["bias"])  # (..., 2 d)
    a = F.layer_norm(a, a.shape[-1:], policy["norm.weight"], policy["norm.bias"]).relu()
    shared, personal = a.chunk(2, -1)
    return (shared - personal).sigmoid()  # softmax over the two


def kernel_distance(a: Tensor, b: Tensor, real: Tensor | None) -> Tensor:
    """() MMD² between the real rows of a and b (B, d)."""
    weights = a.new_ones(len(a)) if real is None else real.to(a.dtype)
    weights = weights / weights.sum().clamp_min(1)

    def mean(one: Tensor, other: Tensor) -> Tensor:
        squares = one.square().sum(1)[:, None] + other.square().sum(1) - 2 * one @ other.T  # (B, B) distances
        kernel = torch.stack([(-squares / (2 * width)).exp() for width in WIDTHS]).sum(0)
        return weights @ kernel @ weights

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)
