"""A shared model is trained to be a good start: one gradient step on a client's samples personalizes it.

Alireza Fallah, Aryan Mokhtari, Asuman Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach, NeurIPS 2020.
Every step uses two batches, D of an inner step and D' of the gradient after it, drawn from two independent orders of
the client's samples: an epoch uses each sample once in either role. The first-order variant drops the Hessian, the
Hessian-free one replaces its product with the gradient by a difference of gradients on D (the paper draws a third batch
for it), exact up to O(δ²) for smooth networks. The step away from the shared model uses the optimizer of local
training. As in the paper, clients count equally; `weight_by_samples` weights them by samples, which with an inner rate
of 0 is FedAvg. The personal model is made once, after the last round, by one inner step on one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Batch, Data, Epoch
from coterie.core.errors import unknown
from coterie.core.losses import inner_product
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections, refused
from coterie.core.ranges import Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree

ORDERS = ("first-order", "hessian-free")


class Server(NamedTuple):
    weights: Weights  # w


class State(NamedTuple):
    momentum: Tree
    tuned: Weights | tuple[()]  # after the last round: the personal model


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class PerFedAvg(Method[Server, State, Down, Up]):
    inner_lr: float = field(default=0.01, metadata={"help": "learning rate of the personal step (α)", "low": 0})
    order: str = field(default="first-order", metadata={"help": f"the meta-gradient: {' or '.join(ORDERS)}"})
    difference: float = field(
        default=1e-3, metadata={"help": "distance of the two gradients of hessian-free (δ)", "above": 0}
    )
    weight_by_samples: bool = field(default=False, metadata={"help": "average models by samples; otherwise uniformly"})

    title: ClassVar[str] = "Per-FedAvg"
    formula: ClassVar[str] = """
        min over w of Σ_i f_i(w - α ∇f_i(w)), by steps on batches D and D':
        w_i ← w_i - η (I - α ∇²f_i(w_i; D)) ∇f_i(w_i - α ∇f_i(w_i; D); D')
        w ← mean of w_i,  personal model: w - α ∇f_i(w)
    """
    family: ClassVar[str] = "fine-tuning"
    suits: ClassVar[tuple[str, ...]] = ("new clients",)
    results: ClassVar[dict[str, str]] = {"Per-FedAvg": "finished"}
    protections: ClassVar[Protections] = {
        "dp-client": ALLOWED,
        "dp-sample": refused("a step takes gradients on two batches, which the privacy accountant does not count"),
    }
    personal_is_global: ClassVar[bool] = True  # before the personal step

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise unknown("order", self.order, ORDERS)

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start), tuned=())

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:
            return model.loss(model(w, batch.x), batch)

        def step(carry: tuple[Weights, Tree], pair: tuple[Batch, Batch]) -> tuple[Weights, Tree]:
            (w, momentum), (inner, outer) = carry, pair
            adapted = self.personal_step(model, w, inner)
            away = tree.apply(torch.sub, tree.trained(adapted), tree.trained(w))  # -α ∇f(w; D)
            bend = self.curvature(model, w, adapted, inner, outer)

            def meta_loss(w: Weights, batch: Batch) -> Tensor:  # its gradient: (I - α ∇²f(w; D)) ∇f(w + away; D')
                task = loss(moved(w, away), batch)
                return task - self.inner_lr * inner_product(w, bend) if bend else task

            return self.train.step(w, meta_loss, outer, data.rate, momentum)

        orders = (data, replace(data, key=random.derive(data.key, random.EXPLORE)))
        pairs = (Pairs(inner, outer) for outer, inner in zip(*map(self.train.runs, orders), strict=True))
        weights, momentum = fold((down.weights, state.momentum), ((step, run) for run in pairs))
        return State(momentum if self.train.keep_momentum else {}, tuned=()), Up(weights, data.samples)

    def personal_step(self, model: Model, w: Weights, batch: Batch) -> Weights:
        """w - α ∇f(w; D)."""
        inner = self.train.plain().but(lr=self.inner_lr)
        rate = model.mean.new_ones(())  # α does not follow a schedule of learning rates
        return inner.step(w, lambda w, batch: model.loss(model(w, batch.x), batch), batch, rate, {})[0]

    def curvature(self, model: Model, w: Weights, adapted: Weights, inner: Batch, outer: Batch) -> Tree:
        """∇²f(w; D) ∇f(adapted; D'), by a central difference; empty for the first-order variant."""
        if self.order == "first-order":
            return {}

        def slope(at: Weights, batch: Batch) -> Tree:
            statistics = {n: t for n, t in tree.items(at) if tree.is_statistic(n)}
            return self.train.gradient(
                at, lambda w, batch: model.loss(model(w, batch.x), batch), batch, tree.trained(at), statistics
            )[0]

        reach = tree.apply(lambda g: self.difference * g, slope(adapted, outer))
        ahead = slope(moved(w, reach), inner)
        behind = slope(moved(w, tree.apply(torch.neg, reach)), inner)
        return tree.apply(lambda a, b: (a - b) / (2 * self.difference), ahead, behind)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        samples = ups.samples if self.weight_by_samples else torch.ones_like(ups.samples)
        return Server(tree.average(ups.weights, samples))

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        run = next(iter(self.train.but(local_epochs=1).runs(data)))
        batch = run.drawn.part(slice(0, run.size))._replace(partial=True)
        return State(state.momentum, tuned=self.personal_step(model, down.weights, batch))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.tuned or down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)


@dataclass(frozen=True)
class Pairs:
    """Steps on two batches, from two orders of the same samples; a `steps.Steps`."""

    inner: Epoch
    outer: Epoch

    def __iter__(self) -> Iterator[tuple[Batch, Batch]]:
        return zip(self.inner, self.outer, strict=True)

    def at(self, place: Tensor) -> tuple[Batch, Batch]:
        return self.inner.at(place), self.outer.at(place)

    def last(self) -> tuple[Batch, Batch]:
        return self.inner.last(), self.outer.last()

    @property
    def alone(self) -> bool:
        return self.outer.alone

    @property
    def size(self) -> int:
        return self.outer.size

    @property
    def full(self) -> int:
        return self.outer.full

    @property
    def rest(self) -> int:
        return self.outer.rest

    @property
    def tensors(self) -> Tree:
        return tree.flatten((self.inner.tensors, self.outer.tensors))

    def having(self, tensors: Tree) -> Pairs:
        inner, outer = tree.fill((self.inner.tensors, self.outer.tensors), tensors)
        return Pairs(self.inner.having(inner), self.outer.having(outer))


def moved(w: Weights, by: Tree) -> Weights:
    """w plus a change of its trained tensors."""
    return tree.fill(w, {n: t + by[n] if n in by else t for n, t in tree.items(w)}, leaf=None)
