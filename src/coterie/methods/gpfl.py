"""A conditional valve turns features into personal ones for the task and generic ones for shared class embeddings.

Jianqing Zhang, Yang Hua, Hao Wang, Tao Song, Zhengui Xue, Ruhui Ma, Jian Cao, Haibing Guan: GPFL: Simultaneously
Learning Global and Personalized Feature Information for Personalized Federated Learning, ICCV 2023.
As in the authors' code, conditions come from the table of embeddings that the client had before the download, zeros at
first; `current` uses the downloaded table, as the paper describes. Clients receive nothing in rounds they skip, so the
table they had is the one they trained last. After training (`post`), conditions are those of the next round.
The weight decay of table and valve is `table_decay`; that of encoder and head is the one of local training.
The global model needs no generic condition, so only heads and personal conditions are averaged for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.errors import unknown
from coterie.core.init import generator, linear, normal
from coterie.core.losses import cross_entropy
from coterie.core.method import Census, Method
from coterie.core.model import Model
from coterie.core.protections import HEADS, Protections, refused, unless
from coterie.core.ranges import Samples
from coterie.core.tree import Tree, average

CONDITIONS = ("previous", "current")
PARTS = ("scale", "shift")  # γ and β of the valve


class Shared(NamedTuple):
    encoder: Tree
    table: Tensor  # (K, d) U: class embeddings
    valve: Tree  # CoV, the conditional valve


class Trained(NamedTuple):
    shared: Shared
    head: Tree


class Server(NamedTuple):
    shared: Shared
    head: Tree  # mean of the heads, for the global model only
    condition: Tensor  # (d,) mean of p_i, for the global model only


class State(NamedTuple):
    head: Tree
    table: Tensor  # (K, d) U_i of the last training
    priors: Tensor  # (K,) share of each class in the client's samples
    momentum: Tree


class Down(NamedTuple):
    shared: Shared


class Up(NamedTuple):
    shared: Shared
    head: Tree  # empty unless heads are averaged
    condition: Tensor | tuple[()]  # (d,) p_i, if heads are averaged
    samples: Samples  # () n_i


@dataclass(frozen=True)
class GPFL(Method[Server, State, Down, Up]):
    pull: float = field(
        default=1e-3, metadata={"help": "pull of generic features towards the embedding of their class (λ)", "low": 0}
    )
    table_decay: float = field(
        default=0.1, metadata={"help": "weight decay of class embeddings and conditional valve (μ)", "low": 0}
    )
    conditions: str = field(
        default="previous", metadata={"help": "table of class embeddings for the conditions: previous or current"}
    )
    average_heads: bool = field(default=False, metadata={"help": "also send heads, to evaluate a global model"})

    title: ClassVar[str] = "GPFL"
    formula: ClassVar[str] = """
        ℓ(φ_i(C(z, p_i)), y) + ℓ(cos(C(z, g), e), y) + λ |C(z, g) - e_y|
        C(z, c) = relu((1 + γ(c)) ⊙ z + β(c)),  p_i = Σ_k n_ik e_k / n_i,  g = mean of e_k
        (θ, C, e) ← Σ_i p_i (θ, C, e of client i)
    """
    family: ClassVar[str] = "personal head"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"GPFL": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": unless(HEADS, average_heads=False),
        "dp-sample": refused("features depend on the client's class shares, without noise"),
    }
    needs_classes: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.conditions not in CONDITIONS:
            raise unknown("source of conditions", self.conditions, CONDITIONS)

    def server_init(self, model: Model, census: Census) -> Server:
        draw, like, d, start = generator(model), model.mean, model.dim, blank(model)
        table, valve = normal(draw, (model.classes, d), like), dict(start.valve)
        for part in PARTS:
            valve[f"{part}.weight"], valve[f"{part}.bias"] = linear(draw, d, (d,), like)
        return Server(start._replace(table=table, valve=valve), model.start.head, like.new_zeros(d))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.shared)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        start = Trained(blank(model), model.start.head)
        return State(start.head, start.shared.table, data.counts / data.samples, self.train.start(start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        personal, generic = self.personal(state, down), self.source(state, down).mean(0)  # (d,) p_i, g_i
        more_decay = self.table_decay - self.train.weight_decay  # in addition to the decay of everything

        def loss(w: Trained, batch: Batch) -> Tensor:
            (encoder, table, valve), head = w
            z = model.features(encoder, batch.x)
            task = model.loss(model.logits(head, steer(valve, z, personal)), batch)
            z = steer(valve, z, generic)
            angle = cross_entropy(F.normalize(z) @ F.normalize(table).T, batch.y)  # cosines as logits
            distance = norm(z - down.shared.table[batch.y], batch.real)
            size = table.square().sum() + torch.stack([t.square().sum() for t in valve.values()]).sum()
            return task + angle + self.pull * distance + more_decay / 2 * size

        trained, momentum = self.train(Trained(down.shared, state.head), loss, data, state.momentum)
        shared, head = trained
        up = Up(shared, head, personal, data.samples) if self.average_heads else Up(shared, {}, (), data.samples)
        return State(head, shared.table, state.priors, momentum), up

    def personal(self, state: State, down: Down) -> Tensor:
        """(d,) p_i: class embeddings, weighted by the client's class shares."""
        return state.priors @ self.source(state, down)

    def source(self, state: State, down: Down) -> Tensor:
        return state.table if self.conditions == "previous" else down.shared.table

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        shared = average(ups.shared, ups.samples)
        if not isinstance(ups.condition, Tensor):
            return server._replace(shared=shared)
        return Server(shared, average(ups.head, ups.samples), average(ups.condition, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        z = model.features(down.shared.encoder, x)
        return model.logits(state.head, steer(down.shared.valve, z, self.personal(state, down)))

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor | None:
        if not self.average_heads:
            return None
        z = model.features(server.shared.encoder, x)
        return model.logits(server.head, steer(server.shared.valve, z, server.condition))


def blank(model: Model) -> Shared:
    """The initial encoder, with a table and a valve of zeros, except for the weights of layer norms."""
    zeros, d = model.mean.new_zeros, model.dim
    valve: Tree = {}
    for part in PARTS:
        valve |= {f"{part}.weight": zeros(d, d), f"{part}.bias": zeros(d)}
        valve |= {f"{part}.norm.weight": zeros(d) + 1, f"{part}.norm.bias": zeros(d)}
    return Shared(model.start.encoder, zeros(model.classes, d), valve)


def steer(valve: Tree, z: Tensor, condition: Tensor) -> Tensor:
    """CoV: features (B, d), scaled and shifted by the condition (d,)."""

    def layer(part: str) -> Tensor:
        h = (valve[f"{part}.weight"] @ condition + valve[f"{part}.bias"]).relu()
        return F.layer_norm(h, h.shape, valve[f"{part}.norm.weight"], valve[f"{part}.norm.bias"])

    return ((1 + layer("scale")) * z + layer("shift")).relu()


def norm(z: Tensor, real: Tensor | None) -> Tensor:
    """() Frobenius norm over the real rows; its gradient at zero is zero."""
    squares = z.square().sum(1) if real is None else torch.where(real, z.square().sum(1), 0.0)  # (B,)
    some = squares.sum() > 0
    return torch.where(some, squares.sum(), 1.0).sqrt() * some
