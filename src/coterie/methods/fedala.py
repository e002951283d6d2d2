"""Before training, each client mixes its last model into the received one, element by element, with learned weights.

Jianqing Zhang, Yang Hua, Hao Wang, Tao Song, Zhengui Xue, Ruhui Ma, Haibing Guan: FedALA: Adaptive Local Aggregation
for Personalized Federated Learning, AAAI 2023.
The upper layers of the model that a client starts from are θ_i + (θ - θ_i) ⊙ W, the lower ones are those of the
received θ. W stays in [0, 1] and is learned by gradient steps on a random share of the client's samples. In its first
round a client takes the received model as it is. In its second, the paper learns W until the loss settles; here for
`first_epochs`, a fixed number, and for one epoch in every later round. The model that is tested before training mixes
the next download with the last W. The layers of W run in evaluation mode while it is learned, and BatchNorm's running
statistics are those received.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Batch, Data, features
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections, refused
from coterie.core.ranges import Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree


class Server(NamedTuple):
    weights: Weights  # θ


class State(NamedTuple):
    upper: Tree  # θ_i: upper layers of the client's last model
    mixing: Tree  # W: share of the received model in each of their numbers
    rounds: Tensor  # () number of rounds that the client took part in
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedALA(Method[Server, State, Down, Up]):
    layers: int = field(default=1, metadata={"help": "upper layers that are mixed (p); 0: none", "low": 0})
    mixing_lr: float = field(default=1.0, metadata={"help": "learning rate of the mixing weights (η)", "low": 0})
    mixing_share: float = field(
        default=0.8, metadata={"help": "share of samples that mixing weights are learned on (s)", "above": 0, "high": 1}
    )
    first_epochs: int = field(
        default=10, metadata={"help": "epochs of the mixing weights when a client first learns them", "low": 1}
    )

    title: ClassVar[str] = "FedALA"
    formula: ClassVar[str] = """
        ŵ_i = w_i + (w - w_i) ⊙ W_i in the upper layers, w in the others
        W_i ← clip(W_i - η ∇_W f_i(ŵ_i), 0, 1)
        w_i ← SGD(f_i; ŵ_i),  w ← Σ_i p_i w_i
    """
    family: ClassVar[str] = "mixture"
    results: ClassVar[dict[str, str]] = {"FedALA": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": ALLOWED,
        "dp-sample": refused(
            "mixing weights are learned on a part of the samples, whose batches the privacy accountant does not count"
        ),
    }

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        upper = self.upper(model.start)
        rounds = torch.zeros((), dtype=torch.int64, device=model.mean.device)
        return State(upper, tree.apply(torch.ones_like, upper), rounds, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        mixing = self.learned(model, state, down, data) if state.upper else state.mixing
        weights, momentum = self.train(
            mixed(down.weights, state.upper, mixing),
            lambda w, batch: model.loss(model(w, batch.x), batch),
            data,
            state.momentum,
        )
        return State(self.upper(weights), mixing, state.rounds + 1, momentum), Up(weights, data.samples)

    def learned(self, model: Model, state: State, down: Down, data: Data) -> Tree:
        """W after `first_epochs` in the client's second round, one epoch later, and none in its first."""
        part, _ = replace(data, key=random.derive(data.key, random.EXPLORE)).split(self.mixing_share)
        descent = self.train.plain().but(
            lr=self.mixing_lr, schedule="constant", local_epochs=self.first_epochs, drop_last=False
        )
        head_only = all(name.startswith("head.") for name in state.upper)  # then features do not change
        if head_only:
            part = part.of(features(model, down.weights.encoder, part))
        rate = torch.ones_like(data.rate)

        def loss(mixing: Tree, batch: Batch) -> Tensor:
            w = mixed(down.weights, state.upper, mixing)
            return model.loss(model.logits(w.head, batch.x) if head_only else model(w, batch.x), batch)

        def step(mixing: Tree, batch: Batch) -> Tree:
            moved, _ = descent.step(mixing, loss, batch, rate, {})
            return tree.apply(lambda t: t.clamp(0, 1), moved)

        def first_step(mixing: Tree, batch: Batch) -> Tree:
            return tree.where(state.rounds > 0, step(mixing, batch), mixing)

        def more_step(mixing: Tree, batch: Batch) -> Tree:
            return tree.where(state.rounds == 1, step(mixing, batch), mixing)

        epochs = enumerate(descent.runs(part))
        return fold(state.mixing, ((more_step if number else first_step, run) for number, run in epochs))

    def upper(self, weights: Weights) -> Tree:
        """The trained tensors of the upper layers, by dotted name."""
        trained = tree.trained(weights)
        names = list(dict.fromkeys(name.rpartition(".")[0] for name in trained))
        chosen = set(names[len(names) - min(self.layers, len(names)) :])
        return {name: t for name, t in trained.items() if name.rpartition(".")[0] in chosen}

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(tree.average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(mixed(down.weights, state.upper, state.mixing), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)


def mixed(received: Weights, upper: Tree, mixing: Tree) -> Weights:
    """θ with its upper layers replaced by θ_i + (θ - θ_i) ⊙ W, eq. (5)."""
    flat = tree.flatten(received)
    return tree.fill(received, flat | {n: own + (flat[n] - own) * mixing[n] for n, own in upper.items()})
