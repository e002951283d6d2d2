"""FedAvg with sharpness-aware local steps: each follows the gradient at the worst point nearby.

Zhe Qu, Xingyu Li, Rui Duan, Yao Liu, Bo Tang, Zhuo Lu: Generalized Federated Learning via Sharpness Aware Minimization,
ICML 2022.
The worst point follows the gradient of the task's loss on the batch, without momentum, weight decay and clipping; these
belong to the step. BatchNorm's statistics are those of the second pass, at the worst point. The server step size is 1;
a mean weighted by samples (`weight_by_samples`) with a radius of 0 is FedAvg. Default not verified in the paper: ρ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree

Carry = tuple[Weights, Tree]  # weights and state of the optimizer


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedSAM(Method[Server, State, Down, Up]):
    radius: float = field(default=0.5, metadata={"help": "distance to the worst point (ρ); 0: FedAvg", "low": 0})
    weight_by_samples: bool = field(default=False, metadata={"help": "average models by samples; otherwise uniformly"})

    title: ClassVar[str] = "FedSAM"
    formula: ClassVar[str] = """
        w_i ← w_i - η ∇f_i(w_i + ρ g / |g|),  g = ∇f_i(w_i)
        w ← mean of w_i
    """
    family: ClassVar[str] = "global model"
    results: ClassVar[dict[str, str]] = {"FedSAM": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:
            return model.loss(model(w, batch.x), batch)

        def step(carry: Carry, batch: Batch) -> Carry:
            weights, momentum = carry
            statistics = {n: t for n, t in tree.items(weights) if tree.is_statistic(n)}
            slope, _ = self.train.gradient(weights, loss, batch, tree.trained(weights), statistics)
            norm = torch.stack([g.square().sum() for g in slope.values()]).sum().sqrt()
            up = self.radius / norm.clamp_min(1e-12)  # ρ / ||g||

            def worst(w: Weights, batch: Batch) -> Tensor:  # its gradient in w is that at w + ρ g / ||g||
                raised = {n: t + up * slope[n] if n in slope else t for n, t in tree.items(w)}
                return loss(tree.fill(w, raised, leaf=None), batch)

            return self.train.step(weights, worst if self.radius else loss, batch, data.rate, momentum)

        weights, momentum = fold((down.weights, state.momentum), ((step, run) for run in self.train.runs(data)))
        return State(momentum if self.train.keep_momentum else {}), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        samples = ups.samples if self.weight_by_samples else torch.ones_like(ups.samples)
        return Server(tree.average(ups.weights, samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
