"""Parameters that matter most to a client are averaged among clients that share them, the others among all.

Xinghao Wu, Xuefeng Liu, Jianwei Niu, Guogang Zhu, Shaojie Tang: Bold but Cautious: Unlocking the Potential of
Personalized Federated Learning through Cautiously Aggressive Collaboration, ICCV 2023.
A parameter is critical if |Δw · w| is among the top τ of its tensor after local training; one that did not move never
is. The server mixes a client's model from the global one (by samples) and the mean of its collaborators, which all
count equally, so only the mixture is sent. Overlaps are those of the participants of a round. A client that skips
rounds keeps its critical parameters, and a client that has not trained yet has none: it receives the global model. The
threshold of round t, counted from 1, is O_avg + t/β (O_max - O_avg).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, OWN_ROWS, Protections, refused
from coterie.core.ranges import Samples
from coterie.core.tree import Tree


class Server(NamedTuple):
    weights: Weights  # w_g
    customized: Tree  # (m, ...) w_c of each client: the mean of its collaborators, for trained parameters
    critical: Tree  # (m, ...) M of each client; False before its first training
    overlap: Tensor  # (m, m) O between clients, as of the last round in which both took part
    round: Tensor  # () t, number of completed rounds


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights  # M_i w_ci + (1 - M_i) w_g


class Up(NamedTuple):
    weights: Weights
    critical: Tree  # M_i, bool
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedCAC(Method[Server, State, Down, Up]):
    critical: float = field(
        default=0.5, metadata={"help": "share of each tensor's parameters that are critical (τ)", "low": 0, "high": 1}
    )
    collaboration: int = field(
        default=100, metadata={"help": "rounds after which clients no longer share critical parameters (β)", "low": 1}
    )

    title: ClassVar[str] = "FedCAC"
    formula: ClassVar[str] = """
        M_i: the top τ of |w_i - w̃_i| ⊙ |w_i|,  C_i: clients whose M_j overlaps M_i enough
        w̃_i ← M_i ⊙ mean of w_j over C_i + (1 - M_i) ⊙ Σ_j p_j w_j
        w_i = SGD(f_i; w̃_i)
    """
    family: ClassVar[str] = "collaborators"
    results: ClassVar[dict[str, str]] = {"FedCAC": "pre"}
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused("its server averages clients with similar critical parameters, which get no noise"),
        "dp-sample": ALLOWED,  # what is critical follows from the model before and after private training
    }

    def server_init(self, model: Model, census: Census) -> Server:
        m, start = len(census.samples), tree.trained(model.start)
        customized = {n: t.expand(m, *t.shape).clone() for n, t in start.items()}
        critical = {n: torch.zeros_like(t, dtype=torch.bool) for n, t in customized.items()}
        overlap = model.mean.new_zeros(m, m)
        return Server(model.start, customized, critical, overlap, torch.zeros_like(overlap[0, 0], dtype=torch.int64))

    def server_send(self, server: Server, client: Tensor) -> Down:
        critical, customized = tree.pick((server.critical, server.customized), client)
        shared = tree.flatten(server.weights)
        mixed = {n: torch.where(critical[n], customized[n], shared[n]) for n in critical}
        return Down(tree.fill(server.weights, shared | mixed))

    def server_greet(self, server: Server) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        before = tree.trained(down.weights)
        critical = {n: self.top((t - before[n]) * t) for n, t in tree.trained(weights).items()}
        return State(momentum), Up(weights, critical, data.samples)

    def top(self, change: Tensor) -> Tensor:
        """The mask of the top τ by magnitude, zeros excluded. change: Δw · w, whose magnitude is the sensitivity Ω."""
        sensitivity = change.abs()
        count = int(self.critical * change.numel())
        if not count:
            return torch.zeros_like(change, dtype=torch.bool)
        return (sensitivity >= sensitivity.flatten().topk(count).values[-1]) & (sensitivity > 0)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        t = server.round + 1
        overlap = overlaps(ups.critical)  # (S, S)
        together = self.collaborators(overlap, t)
        customized = tree.mix(tree.trained(ups.weights), together / together.sum(1, keepdim=True))
        return Server(
            tree.average(ups.weights, ups.samples),
            tree.put(server.customized, clients, customized),
            tree.put(server.critical, clients, ups.critical),
            server.overlap.index_put((clients[:, None], clients), overlap.to(server.overlap.dtype)),
            t,
        )

    def collaborators(self, overlap: Tensor, t: Tensor) -> Tensor:
        """(S, S) 1 where the column's client is in C_i of the row's: its overlap reaches the threshold."""
        own = torch.eye(len(overlap), dtype=torch.bool, device=overlap.device)
        pairs = max(len(overlap) * (len(overlap) - 1), 1)
        mean = torch.where(own, 0.0, overlap).sum() / pairs  # O_avg
        most = torch.where(own, 0.0, overlap).max()  # O_max
        return (own | (overlap >= mean + t / self.collaboration * (most - mean))).to(overlap.dtype)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)

    def server_report(self, server: Server) -> Tree:
        return {"overlap": server.overlap}


def overlaps(critical: Tree) -> Tensor:
    """(S, S) O_ij = 1 - ||M_i - M_j||_1 / (|M_i| + |M_j|); both counts are n in the paper. 0 if neither has any."""
    flat = [mask.flatten(1).double() for mask in critical.values()]  # (S, P) each
    common = torch.stack([mask @ mask.T for mask in flat]).sum(0)  # |M_i ∩ M_j|
    counts = common.diagonal()
    return 2 * common / (counts[:, None] + counts).clamp_min(1)
