"""FedAvg with control variates, which correct the drift of each client in every local step.

Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank J. Reddi, Sebastian U. Stich, Ananda Theertha Suresh:
SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
Controls follow option II of the paper; the server step size is 1. Momentum is always off, whatever the protocol sets:
option II estimates a client's gradient from the distance its model moved, which momentum would increase. Clients send
the trained model; with that server step size, this is equivalent to sending the change.
FedPAC's comparison seems to average control changes over the participants, not over all clients
(`controls_of_participants`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.losses import inner_product
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.schedules import RateSchedule
from coterie.core.tree import Tree


class Server(NamedTuple):
    weights: Weights  # x
    control: Tree  # c, for trained parameters
    samples: Tensor  # (m,) n_i of all clients


class State(NamedTuple):
    control: Tree  # c_i


class Down(NamedTuple):
    weights: Weights
    control: Tree  # c


class Up(NamedTuple):
    weights: Weights  # y_i
    control_change: Tree  # Δc_i


@dataclass(frozen=True)
class SCAFFOLD(Method[Server, State, Down, Up]):
    weight_by_samples: bool = field(default=False, metadata={"help": "average models by samples; otherwise uniformly"})
    controls_of_participants: bool = field(
        default=False, metadata={"help": "average control changes over participants; otherwise over all clients"}
    )

    title: ClassVar[str] = "SCAFFOLD"
    formula: ClassVar[str] = """
        y ← y - η (∇f_i(y) - c_i + c), K steps from y = w
        c_i⁺ = c_i - c + (w - y_i) / (K η)
        w ← mean of y_i,  c ← c + Σ_i (c_i⁺ - c_i) / m
    """
    family: ClassVar[str] = "global model"
    results: ClassVar[dict[str, str]] = {"SCAFFOLD": "pre"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}
    personal_is_global: ClassVar[bool] = True
    needs_sgd: ClassVar[str] = "its controls are gradients, estimated from the distance that a model moved"

    def refuses(self, rates: RateSchedule) -> str:
        return "its controls divide by the number of local steps and one rate for all of them" * rates.local.varies

    def server_init(self, model: Model, census: Census) -> Server:
        control = tree.apply(torch.zeros_like, tree.trained(model.start))
        return Server(model.start, control, model.mean.new_tensor(census.samples.tolist()))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights, server.control)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(tree.apply(torch.zeros_like, tree.trained(model.start)))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        correction = tree.apply(torch.sub, down.control, state.control)  # c - c_i

        def loss(y: Weights, batch: Batch) -> Tensor:  # its gradient: g(y) - c_i + c
            return model.loss(model(y, batch.x), batch) + inner_product(y, correction)

        weights, _ = self.train.but(momentum=0.0)(down.weights, loss, data, {})
        scale = self.train.steps(data.samples).clamp_min(1) * self.train.lr * data.rate  # K η_l
        change = tree.apply(  # c_i⁺ - c_i = (x - y_i) / (K η_l) - c
            lambda x, y, c: (x - y) / scale - c, tree.trained(down.weights), tree.trained(weights), down.control
        )
        return State(tree.apply(torch.add, state.control, change)), Up(weights, change)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        samples = server.samples[clients]
        weights = tree.average(ups.weights, samples if self.weight_by_samples else torch.ones_like(samples))
        count = len(clients) if self.controls_of_participants else len(server.samples)  # |S| or m
        control = tree.apply(lambda c, change: c + change.sum(0) / count, server.control, ups.control_change)
        return Server(weights, control, server.samples)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
