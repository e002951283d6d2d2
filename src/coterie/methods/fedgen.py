"""The server trains a generator of features that the clients' heads recognize; clients also train on its features.

Zhuangdi Zhu, Junyuan Hong, Jiayu Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning,
ICML 2021.
The generator is two dense layers on noise and a one-hot label, without BatchNorm (the authors' code has it). As in
that code, it keeps its Adam moments between rounds, a diversity term keeps it from ignoring the noise, and there is
nothing to distill in the first round. Every sample of a batch brings one generated feature. The distilled loss has
weight 1 (not verified); the authors' code begins with 10, lowers it by 2 % every round, and adds a second term.
Labels are drawn in proportion to the participants' class counts of the last round. Sizes, steps, batch and learning
rate of the generator are those of the code for EMNIST, without its weight decay and its decay of the rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Batch, Data
from coterie.core.data import Transform
from coterie.core.init import generator, linear
from coterie.core.losses import cross_entropy
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import Protections, refused
from coterie.core.ranges import Counted
from coterie.core.steps import fold
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree

Carry = tuple[Weights, Tree]  # weights and state of the optimizer
LABEL, NOISE = range(2)  # what is drawn for a generated feature
READABLE = "clients send class counts, without noise"


class Server(NamedTuple):
    weights: Weights  # θ
    generator: Tree  # w
    moments: Tree  # of Adam
    labels: Tensor  # (K,) p(y), zeros before the first round
    heads: Tree  # (S, ...) of the last participants


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights
    generator: Tree
    labels: Tensor  # (K,)


class Up(NamedTuple):
    weights: Weights  # θ_k
    counts: Counted  # (K,) c_k


@dataclass(frozen=True)
class FedGen(Method[Server, State, Down, Up]):
    distill: float = field(
        default=1.0, metadata={"help": "weight of the loss on generated features; 0: FedAvg", "low": 0}
    )
    noise: int = field(default=32, metadata={"help": "length of the generator's noise", "low": 1})
    hidden_units: int = field(default=256, metadata={"help": "units of the generator's hidden layer", "low": 1})
    diversity: float = field(default=1.0, metadata={"help": "weight of the generator's diversity term", "low": 0})
    server_lr: float = field(default=1e-4, metadata={"help": "learning rate of the generator (Adam)", "low": 0})
    server_steps: int = field(default=50, metadata={"help": "steps of the generator per round", "low": 0})
    server_batch: int = field(default=32, metadata={"help": "features per step of the generator", "low": 1})

    title: ClassVar[str] = "FedGen"
    formula: ClassVar[str] = """
        G ← Adam on ℓ(mean of φ_i(G(y, ε)), y) + e^{-mean of |ε - ε'|² |z - z'|},  z = G(y, ε)
        w_i = SGD(f_i + ℓ(φ(G(y, ε)), y); w)
        w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "global model"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedGen": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": refused("its server trains on the head of every client, not on their mean"),
        "dp-sample": refused(READABLE),
        "dp-statistics": refused(READABLE),
        "dp-both": refused(READABLE),
    }
    personal_is_global: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    @property
    def training(self) -> LocalTraining:
        """Of the generator."""
        return LocalTraining(
            local_epochs=1, batch_size=self.server_batch, optimizer="adam", lr=self.server_lr, keep_momentum=True
        )

    def server_init(self, model: Model, census: Census) -> Server:
        draw, like, made = generator(model), model.mean, Tree()
        sizes = (self.noise + model.classes, self.hidden_units, model.dim)
        for name, inputs, outputs in zip(("hidden", "out"), sizes[:-1], sizes[1:], strict=True):
            made[f"{name}.weight"], made[f"{name}.bias"] = linear(draw, inputs, (outputs,), like)
        heads = tree.apply(lambda t: t.new_zeros(0, *t.shape), model.start.head)
        return Server(model.start, made, self.training.start(made), like.new_zeros(model.classes), heads)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights, server.generator, server.labels)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        begun = down.labels.any()  # False in the first round

        def loss(w: Weights, batch: Batch) -> Tensor:
            task = model.loss(model(w, batch.x), batch)
            if not self.distill:
                return task
            assert batch.key is not None
            y, noise = self.drawn(random.derive(batch.key, batch.sample), down.labels)
            distilled = cross_entropy(model.logits(w.head, self.generated(down.generator, y, noise)), y)
            return task + self.distill * begun * distilled

        def step(carry: Carry, batch: Batch) -> Carry:
            return self.train.step(carry[0], loss, batch, data.rate, carry[1])

        runs = (
            replace(run, drawn=run.drawn._replace(key=random.derive(data.key, random.DRAW, epoch)))
            for epoch, run in enumerate(self.train.runs(data))
        )
        weights, momentum = fold((down.weights, state.momentum), ((step, run) for run in runs))
        return State(momentum if self.train.keep_momentum else {}), Up(weights, data.counts)

    def drawn(self, keys: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels (B,) and noise (B, noise) for keys (B,)."""
        noise = random.normals(random.derive(keys, NOISE), self.noise)
        return random.categories(random.derive(keys, LABEL), labels), noise.to(labels.dtype)

    def generated(self, generator: Tree, y: Tensor, noise: Tensor) -> Tensor:
        """(B, d) features of labels (B,) and noise (B, noise)."""
        classes = torch.arange(generator["hidden.weight"].shape[1] - noise.shape[1], device=y.device)
        given = torch.cat([noise, (y[:, None] == classes).to(noise.dtype)], 1)
        hidden = self.activated(given @ generator["hidden.weight"].T + generator["hidden.bias"])
        return hidden @ generator["out.weight"].T + generator["out.bias"]

    def activated(self, hidden: Tensor) -> Tensor:
        """(B, hidden_units) of the generator."""
        return hidden.relu()

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        mean, total = tree.average(ups.weights, ups.counts.sum(1)), ups.counts.sum(0)
        return Server(mean, server.generator, server.moments, total / total.sum(), ups.weights.head)

    def server_train(self, model: Model, server: Server, key: Tensor) -> Server:
        count = self.server_steps * self.server_batch
        y, noise = self.drawn(random.derive(key, torch.arange(count, device=key.device)), server.labels)
        rate = torch.ones((), dtype=noise.dtype, device=key.device)
        data = Data(noise, y, key, rate, model.classes, Transform(), alone=True)

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = self.generated(w, batch.y, batch.x)
            logits = torch.func.vmap(lambda head: model.logits(head, z))(server.heads).mean(0)  # of the ensemble
            task = cross_entropy(logits, batch.y)
            return task + self.diversity * sameness(batch.x, z) if self.diversity else task

        trained, moments = self.training(server.generator, loss, data, server.moments)
        return server._replace(generator=trained, moments=moments)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)


def sameness(noise: Tensor, z: Tensor) -> Tensor:
    """() exp(-mean of d(ε, ε') d(z, z') over all pairs): small if unlike noise makes unlike features."""
    apart = (noise[:, None] - noise).square().mean(2)  # (B, B)
    return (-(apart * (z[:, None] - z).abs().mean(2)).mean()).exp()
