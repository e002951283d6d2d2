"""FedAvg in clusters of clients; a cluster that has settled while its clients still pull apart is split in two.

Felix Sattler, Klaus-Robert Müller, Wojciech Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints, IEEE TNNLS 2021.
A cluster is split if its mean update is short, some client's update is long, and the similarity across the best
bipartition, which minimizes the largest cosine across, is small enough. The number of clusters is bounded, so that
shapes do not change. The paper has all clients in every round. Here the server keeps the last update of each client,
and a cluster can be split once all its clients have trained in it. A client that was not in training receives the model
of the largest cluster; the paper would compare its update with those at every split.
The lengths for splitting, ε_1 and ε_2, are those of the authors' notebook and depend on the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections, refused, robust
from coterie.core.ranges import Samples
from coterie.core.tree import Tree

DIFFERENT = "its server splits clusters by how updates differ"


class Server(NamedTuple):
    models: Weights  # (C, ...) of the clusters; copies of the start where there is none yet
    cluster: Tensor  # (m,) the cluster of each client
    made: Tensor  # () number of clusters so far
    updates: Tree  # (m, ...) ΔW_i of each client's last training
    samples: Tensor  # (m,) n_i
    known: Tensor  # (m,) whether the client has trained in its cluster


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights  # of the client's cluster


class Up(NamedTuple):
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class CFL(Method[Server, State, Down, Up]):
    clusters: int = field(default=8, metadata={"help": "most clusters that the server makes", "low": 1})
    settled: float = field(
        default=0.4, metadata={"help": "a cluster is split if its mean update is shorter (ε_1)", "low": 0}
    )
    apart: float = field(default=1.6, metadata={"help": "and the longest update of its clients longer (ε_2)", "low": 0})
    error: float = field(
        default=0.0,
        metadata={"help": "bound on the relative error of updates (γ_max); larger: fewer splits", "low": 0, "high": 1},
    )

    title: ClassVar[str] = "CFL"
    formula: ClassVar[str] = """
        split a cluster if |Σ_i p_i Δ_i| < ε₁, max |Δ_i| > ε₂ and γ_max < √((1 - α) / 2)
        α = min over bipartitions of max cos(Δ_i, Δ_j), i and j on different sides,  Δ_i = SGD(f_i; w) - w
        in each cluster: w ← w + Σ_i p_i Δ_i
    """
    family: ClassVar[str] = "clusters"
    suits: ClassVar[tuple[str, ...]] = ("few clients", "feature shift")
    results: ClassVar[dict[str, str]] = {"CFL": "pre"}
    protections: ClassVar[Protections] = {
        **robust(refused(f"{DIFFERENT}, which robust aggregation would remove")),
        "dp-client": refused(f"{DIFFERENT}, not by their mean"),
        "dp-sample": ALLOWED,
    }

    def server_init(self, model: Model, census: Census) -> Server:
        m, device = len(census.samples), model.mean.device
        models = tree.apply(lambda t: t.expand(self.clusters, *t.shape).clone(), model.start)
        updates = {n: torch.zeros_like(t.expand(m, *t.shape)) for n, t in tree.trained(model.start).items()}
        cluster = torch.zeros(m, dtype=torch.int64, device=device)
        samples = model.mean.new_tensor(census.samples.tolist())
        return Server(models, cluster, torch.ones_like(cluster[0]), updates, samples, torch.zeros_like(cluster).bool())

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(tree.pick(server.models, server.cluster[client]))

    def server_greet(self, server: Server) -> Down:
        sizes = F.one_hot(server.cluster, self.clusters).sum(0)
        return Down(tree.pick(server.models, sizes.argmax()))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        joined = server.cluster[clients]  # (S,)
        before = tree.trained(tree.pick(server.models, joined))
        moved = tree.apply(torch.sub, tree.trained(ups.weights), before)
        after = server._replace(
            models=self.averaged(server.models, joined, ups),
            updates=tree.put(server.updates, clients, moved),
            samples=server.samples.index_put((clients,), ups.samples.to(server.samples.dtype)),
            known=server.known.index_fill(0, clients, True),
        )
        lengths, cosines = compared(after.updates)
        for number in range(self.clusters - 1):  # a new cluster is not split in the round it is made
            after = self.split(after, number, server.made, lengths, cosines)
        return after

    def averaged(self, models: Weights, joined: Tensor, ups: Up) -> Weights:
        """(C, ...) the mean of each cluster's participants by samples; models without any as they were."""
        mass = (F.one_hot(joined, self.clusters).double() * ups.samples.double()[:, None]).T  # (C, S)
        total = mass.sum(1)
        means = tree.mix(ups.weights, mass / total.clamp_min(1e-300)[:, None])
        return tree.apply(
            lambda mean, old: torch.where(total.view(-1, *[1] * (old.ndim - 1)) > 0, mean, old), means, models
        )

    def split(self, server: Server, number: int, count: Tensor, lengths: Tensor, cosines: Tensor) -> Server:
        """The server after a split of this cluster, if it is due. count: clusters before the round."""
        member = server.cluster == number  # (m,)
        weights = torch.where(member, server.samples, 0.0)
        mean = tree.mix(server.updates, weights / weights.sum().clamp_min(1e-30))
        short = torch.stack([t.square().sum() for t in mean.values()]).sum().sqrt()
        first, across = bipartition(cosines, member)
        due = (
            (number < count) & (server.made < self.clusters) & (server.known | ~member).all() & (member.sum() > 1)
            & (short < self.settled) & (torch.where(member, lengths, 0.0).max() > self.apart)
            & (self.error < ((1 - across) / 2).clamp_min(0).sqrt())
        )  # fmt: skip
        leaving = due & member & ~first
        place = torch.arange(self.clusters, device=member.device) == server.made

        def copied(models: Tensor) -> Tensor:
            here = (due & place).view(-1, *[1] * (models.ndim - 1))
            return torch.where(here, models[number], models)

        return server._replace(
            models=tree.apply(copied, server.models),
            cluster=torch.where(leaving, server.made, server.cluster),
            made=server.made + due,
            known=server.known & ~(due & member),
        )

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_report(self, server: Server) -> Tree:
        return {"cluster": server.cluster}


def compared(updates: Tree) -> tuple[Tensor, Tensor]:
    """(m,) lengths of updates and (m, m) cosines between them; 0 for an update of zeros."""
    products = torch.stack([t.flatten(1).double() @ t.flatten(1).double().T for t in updates.values()]).sum(0)
    products = (products + products.T) / 2  # rounding differs between the halves; the bipartition compares both
    lengths = products.diagonal().clamp_min(0).sqrt()
    return lengths, products / (lengths[:, None] * lengths).clamp_min(1e-300)


def bipartition(cosines: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """The bipartition of the members (m,) with the smallest largest cosine across: (m,) one side, () that cosine.

    Joining the most similar pairs first until two parts are left (the paper's algorithm) cuts a maximum spanning tree
    at its weakest edge. Two clients are on one side if a chain of stronger edges connects them.
    """
    own = torch.eye(len(member), dtype=torch.bool, device=member.device)
    chain = torch.where(member[:, None] & member & ~own, cosines, -torch.inf).masked_fill(own, torch.inf)
    for k in range(len(member)):  # the weakest edge of the best chain between two clients
        chain = torch.maximum(chain, torch.minimum(chain[:, k, None], chain[k]))
    across = torch.where(member[:, None] & member, chain, torch.inf).min()
    return tree.pick(chain, member.long().argmax()) > across, across
