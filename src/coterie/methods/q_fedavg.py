"""FedAvg whose server step gives more weight to clients with a larger loss, so that accuracies become more even.

Tian Li, Maziar Sanjabi, Ahmad Beirami, Virginia Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.
The paper draws participants in proportion to their samples and gives them equal weight. Here all clients are drawn with
equal probability, so the shares p_k are in the sums of the server (`weight_by_samples`): the objective is the same, and
without fairness (q = 0) the method is FedAvg. F_k is the mean loss of the received model on all training samples, at
least 1e-10, so that its powers are finite. L is constant, also if the learning rate falls. BatchNorm's statistics are
averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data, sample_losses
from coterie.core.losses import squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import OWN_ROWS, Protections, refused
from coterie.core.ranges import Range, Samples
from coterie.core.schedules import RateSchedule
from coterie.core.tree import Tree

SMALLEST = 1e-10  # loss


class Server(NamedTuple):
    weights: Weights  # w


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights  # w_k
    loss: Annotated[Tensor, Range(0)]  # () F_k(w)
    samples: Samples  # () n_k


@dataclass(frozen=True)
class qFedAvg(Method[Server, State, Down, Up]):
    fairness: float = field(
        default=1.0, metadata={"help": "power of a client's loss in its weight (q); 0: FedAvg", "low": 0}
    )
    lipschitz: float | None = field(
        default=None, metadata={"help": "Lipschitz constant of the gradients (L); default: 1 / lr", "above": 0}
    )
    weight_by_samples: bool = field(default=True, metadata={"help": "weight clients by samples too"})

    title: ClassVar[str] = "q-FedAvg"
    formula: ClassVar[str] = """
        Δ_i = L (w - SGD(f_i; w))
        h_i = q f_i(w)^(q-1) |Δ_i|² + L f_i(w)^q
        w ← w - Σ_i p_i f_i(w)^q Δ_i / Σ_i p_i h_i
    """
    family: ClassVar[str] = "fairness"
    suits: ClassVar[tuple[str, ...]] = ("unequal sizes",)
    results: ClassVar[dict[str, str]] = {"q-FedAvg": "pre"}
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused("its server weights the update of each client by this client's loss"),
        "dp-sample": refused("clients send their mean loss, without noise"),
    }
    personal_is_global: ClassVar[bool] = True
    needs_sgd: ClassVar[str] = "its step size comes from gradients, estimated from the distance that a model moved"

    def refuses(self, rates: RateSchedule) -> str:
        varies = self.lipschitz is None and (rates.rounds.varies or rates.local.varies)
        return "its server assumes a smoothness of 1 / lr, which then changes; set --lipschitz" * varies

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        loss = data.mean(sample_losses(model, down.weights, data))
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum), Up(weights, loss, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        n = ups.samples.double() if self.weight_by_samples else torch.ones_like(ups.samples, dtype=torch.float64)
        distance = torch.func.vmap(lambda w: squared_distance(w, server.weights))(ups.weights).double()
        loss, steep = ups.loss.double().clamp_min(SMALLEST), self.steepness  # F_k, L
        weight = n / n.sum() * loss**self.fairness  # p_k F_k^q
        norm = (weight * (1 + self.fairness * steep * distance / loss)).sum()  # Σ p_k h_k / L
        share = weight / norm

        def step(name: str, w: Tensor, trained: Tensor) -> Tensor:
            """w - Σ p_k Δ_k / Σ p_k h_k, where Δ_k = F_k^q L (w - w_k)."""
            if tree.is_statistic(name):
                return tree.mix(trained, n / n.sum())
            return w + tree.mix(trained - w, share)

        received = tree.flatten(ups.weights)
        moved = {name: step(name, w, received[name]) for name, w in tree.items(server.weights)}
        return Server(tree.fill(server.weights, moved))

    @property
    def steepness(self) -> float:
        """L; any number if the learning rate is 0 and no model moves."""
        return 1 / (self.train.lr or 1.0) if self.lipschitz is None else self.lipschitz

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
