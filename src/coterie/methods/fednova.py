"""FedAvg whose server normalizes each client's change by its number of local steps, so that none counts twice.

Jianyu Wang, Qinghua Liu, Hao Liang, Gauri Joshi, H. Vincent Poor: Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization, NeurIPS 2020.
With momentum, steps are effective ones, |a_i|₁ in the paper: every gradient counts as far as it moves the model until
the round ends. The server computes them from the settings of local training and the number of samples that a client
announced when it joined, so they are not sent. Momentum always starts at zero in a round, whatever `keep_momentum`
says, because the effective steps assume it. BatchNorm's running statistics are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections, refused
from coterie.core.schedules import RateSchedule
from coterie.core.tree import Tree


class Server(NamedTuple):
    weights: Weights  # x
    samples: Tensor  # (m,) n_i of all clients


class State(NamedTuple):
    pass


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights


@dataclass(frozen=True)
class FedNova(Method[Server, State, Down, Up]):
    title: ClassVar[str] = "FedNova"
    formula: ClassVar[str] = """
        w_i = SGD(f_i; w), in τ_i steps
        w ← w + (Σ_j p_j τ_j) Σ_i p_i (w_i - w) / τ_i
    """
    family: ClassVar[str] = "server optimizer"
    suits: ClassVar[tuple[str, ...]] = ("unequal sizes",)
    results: ClassVar[dict[str, str]] = {"FedNova": "pre"}
    protections: ClassVar[Protections] = {
        "dp-client": refused(
            "its server needs each client's number of steps, which reveals its number of samples; without them it is "
            "FedAvg"
        ),
        "dp-sample": ALLOWED,
    }
    personal_is_global: ClassVar[bool] = True
    needs_sgd: ClassVar[str] = "its effective steps are those of SGD with momentum"

    def refuses(self, rates: RateSchedule) -> str:
        return "its effective steps assume one rate for all local steps" * rates.local.varies

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start, model.mean.new_tensor(census.samples.tolist()))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State()

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        fresh = self.train.but(keep_momentum=False)
        weights, _ = fresh(down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, {})
        return state, Up(weights)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        samples = server.samples[clients].double()
        share, steps = samples / samples.sum(), self.effective(self.train.steps(samples))  # (S,) p_i and |a_i|₁
        reach = (share * steps).sum() * share / steps.clamp_min(1)  # (S,) τ_eff p_i / |a_i|₁
        mean, before = tree.mix(ups.weights, share), tree.trained(server.weights)
        moved = {
            name: before[name] + tree.mix(t - before[name], reach)  # x - τ_eff Σ_i p_i η d_i
            for name, t in tree.trained(ups.weights).items()
        }
        return Server(tree.fill(mean, tree.flatten(mean) | moved), server.samples)

    def effective(self, steps: Tensor) -> Tensor:
        """|a|₁: distance covered by this many steps of SGD if all gradients are 1 and the learning rate is 1."""
        m = self.train.momentum
        if not m:
            return steps
        heavy = steps * (steps + 1) / 2 if m == 1 else (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
        return steps + m * heavy if self.train.nesterov else heavy

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
