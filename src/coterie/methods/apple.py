"""Each client downloads every client's core model and learns with which weights their sum is its personal model.

Jun Luo, Shandong Wu: Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning, IJCAI 2022.
A client trains its own core model w_i and its directed relations p_i together; both slopes are taken at the same point.
The relations take plain gradient steps; the authors' code has momentum there. As there, the pull λ(r) μ to p_0, the
shares of samples, decays exponentially to 0.001 in L rounds and is then switched off; the default L is a tenth of the
paper's rounds. The term has the factor 1/2 of the paper's equation; the code has none, so its pull of 0.1 is one of 0.2
here. All clients receive all core models; the paper's limit on downloads is left out. The mixture has the BatchNorm
statistics of the client's own core model, because weights of a mixture may be negative. A client that was not in
training has no core model among the others and learns its relations to them only.
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
from coterie.core.protections import ALLOWED, HANDED_ON, Protections, refused, robust
from coterie.core.steps import fold
from coterie.core.tree import Tree

LEAST = 1e-3  # ε, what is left of the pull in its last round


class Server(NamedTuple):
    cores: Weights  # (m, ...) w_j
    shares: Tensor  # (m,) p_0, shares of samples
    round: Tensor  # () r, number of completed rounds


class PersonalMixture(NamedTuple):
    """What a client trains."""

    core: Weights  # w_i
    relations: Tensor  # (m,) p_i


class State(NamedTuple):
    own: PersonalMixture
    shares: Tensor  # (m,) p_0
    momentum: Tree


class Down(NamedTuple):
    cores: Weights  # (m, ...) w_j
    place: Tensor  # () i, the client's row; -1 if it has none
    pull: Tensor  # () λ(r) μ


class Up(NamedTuple):
    core: Weights  # w_i, as trained: not the mixture


@dataclass(frozen=True)
class APPLE(Method[Server, State, Down, Up]):
    relation_lr: float = field(default=1e-3, metadata={"help": "learning rate of the relations (η_2)", "low": 0})
    pull: float = field(default=0.1, metadata={"help": "pull of the relations to shares of samples (μ)", "low": 0})
    pull_rounds: int = field(default=16, metadata={"help": "rounds after which the pull is off (L)", "low": 0})

    title: ClassVar[str] = "APPLE"
    formula: ClassVar[str] = """
        personal model: Σ_j p_ij w_j
        w_i ← w_i - η ∂f_i / ∂w_i
        p_i ← p_i - η₂ ∂(f_i + λ(r) μ/2 |p_i - p₀|²) / ∂p_i
    """
    family: ClassVar[str] = "collaborators"
    suits: ClassVar[tuple[str, ...]] = ("few clients",)
    results: ClassVar[dict[str, str]] = {"APPLE": "post"}
    protections: ClassVar[Protections] = {
        **robust(refused(f"{HANDED_ON}, which learn weights for it on their own samples")),
        "dp-client": refused(f"{HANDED_ON}, not a mean of many"),
        "dp-sample": ALLOWED,
    }

    def server_init(self, model: Model, census: Census) -> Server:
        m = len(census.samples)
        cores = tree.apply(lambda t: t.expand(m, *t.shape).clone(), model.start)
        samples = model.mean.new_tensor(census.samples.tolist())
        return Server(cores, samples / samples.sum(), torch.zeros_like(samples[0], dtype=torch.int64))

    def server_welcome(self, server: Server) -> Tree:
        return {"shares": server.shares}

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.cores, client.to(server.shares.device, torch.int32), self.strength(server))

    def server_greet(self, server: Server) -> Down:
        return self.server_send(server, torch.tensor(-1))

    def strength(self, server: Server) -> Tensor:
        """() λ(r) μ with λ(r) = ε^(r / L) in the first L rounds."""
        decay = LEAST ** (server.round.to(server.shares.dtype) / max(self.pull_rounds, 1))
        return self.pull * decay * (server.round < self.pull_rounds)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        shares = welcome["shares"]
        return State(PersonalMixture(model.start, shares), shares, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        relating = self.train.plain().but(lr=self.relation_lr)

        def loss(own: PersonalMixture, batch: Batch) -> Tensor:
            return model.loss(model(mixture(own, down), batch.x), batch)

        def related(own: PersonalMixture, batch: Batch) -> Tensor:
            return loss(own, batch) + down.pull / 2 * (own.relations - state.shares).square().sum()

        def step(carry: tuple[PersonalMixture, Tree], batch: Batch) -> tuple[PersonalMixture, Tree]:
            own, momentum = carry
            core, momentum = self.train.step(
                own.core,
                lambda core, batch: loss(PersonalMixture(core, own.relations), batch),
                batch,
                data.rate,
                momentum,
            )
            if not self.relation_lr:
                return PersonalMixture(core, own.relations), momentum
            relations, _ = relating.step(
                {"relations": own.relations},
                lambda p, batch: related(PersonalMixture(own.core, p["relations"]), batch),
                batch,
                data.rate,
                {},
            )
            return PersonalMixture(core, relations["relations"]), momentum

        own, momentum = fold((state.own, state.momentum), ((step, run) for run in self.train.runs(data)))
        return State(own, state.shares, momentum if self.train.keep_momentum else {}), Up(own.core)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(tree.put(server.cores, clients, ups.core), server.shares, server.round + 1)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(mixture(state.own, down), x)


def mixture(own: PersonalMixture, down: Down) -> Weights:
    """Σ_j p_ij w_j with the client's own core model in its place."""
    mine = torch.arange(len(own.relations), device=down.place.device) == down.place  # (m,)
    others, weight = torch.where(mine, 0.0, own.relations), torch.where(mine, own.relations, 0.0).sum()
    there = tree.flatten(down.cores)
    mixed = {
        n: t if tree.is_statistic(n) else weight * t + torch.tensordot(others, there[n], dims=1)
        for n, t in tree.items(own.core)
    }
    return tree.fill(own.core, mixed, leaf=None)
