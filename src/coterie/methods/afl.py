"""The shared model is trained for the worst mixture of the clients: weights follow the losses, on the simplex.

Mehryar Mohri, Gary Sivek, Ananda Theertha Suresh: Agnostic Federated Learning, ICML 2019.
The paper takes one gradient step at a time; here clients train for whole rounds, as in FedAvg, and the mixture λ takes
one step per round, along the losses of the model that was sent. λ begins uniform. Clients that do not take part count
with the participants' mean loss, so that only being worse than others raises a weight; where all clients take part this
changes nothing, since the projection ignores a constant. If the participants have no weight, they count alike. The
paper returns the mean of all iterates; here the last one is the model. It gives no step size for λ (γ_λ).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core.batch import Data, sample_losses
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import OWN_ROWS, Protections, refused
from coterie.core.tree import Tree, average


class Server(NamedTuple):
    weights: Weights
    mixture: Tensor  # (m,) λ


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    loss: Tensor  # () L_k(w)


@dataclass(frozen=True)
class AFL(Method[Server, State, Down, Up]):
    mixture_lr: float = field(
        default=0.1, metadata={"help": "step size of the mixture (γ_λ); 0: uniform FedAvg", "low": 0}
    )

    title: ClassVar[str] = "AFL"
    formula: ClassVar[str] = """
        min over w of the max over λ in the simplex of Σ_i λ_i f_i(w)
        w ← Σ_i λ_i SGD(f_i; w) / Σ_i λ_i
        λ ← projection of λ + γ f(w) onto the simplex
    """
    family: ClassVar[str] = "fairness"
    suits: ClassVar[tuple[str, ...]] = ("few clients", "unequal sizes")
    results: ClassVar[dict[str, str]] = {"AFL": "pre"}
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused("its server weights the update of each client by this client's losses"),
        "dp-sample": refused("clients send their mean loss, without noise"),
    }
    personal_is_global: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        m = len(census.samples)
        return Server(model.start, model.mean.new_full((m,), 1 / m, dtype=torch.float64))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        loss = data.mean(sample_losses(model, down.weights, data))
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum), Up(weights, loss)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        own = server.mixture[clients]  # (S,)
        own = torch.where(own.sum() > 0, own, 1.0)
        slope = ups.loss.double() - ups.loss.double().mean()
        mixture = server.mixture.index_add(0, clients, slope, alpha=self.mixture_lr)
        return Server(average(ups.weights, own), onto_simplex(mixture))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)

    def server_report(self, server: Server) -> Tree:
        return {"mixture": server.mixture}


def onto_simplex(v: Tensor) -> Tensor:
    """The nearest point with nonnegative entries that sum to 1 (Duchi et al., ICML 2008). v: (m,)."""
    ordered = v.sort(descending=True).values
    place = torch.arange(1, len(v) + 1, device=v.device)
    excess = (ordered.cumsum(0) - 1) / place  # (m,) the shift if this many entries are positive
    last = (ordered > excess).sum() - 1
    return (v - excess.gather(0, last[None])).clamp_min(0)
