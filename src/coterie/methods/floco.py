"""Clients train a simplex of heads on one shared encoder, each in its own region once the server has assigned it.

Dennis Grinwald, Philipp Wiesner, Shinichi Nakajima: Federated Learning over Connected Modes, NeurIPS 2024.
Without Floco+, which adds Ditto's personal model. The authors' code assigns regions after 250 of 500 rounds, by updates
of all clients in one round; here `begin` counts rounds and is set for 100 of them, and a client's update is its latest.
A client that first trains later is projected by its first update, on the axes of the others; until then it has the
whole simplex. M and ρ are those of the paper's Five-Fold split of clients; it has 20 and 0.01 for Dirichlet splits, 10
and 0.5 for FEMNIST. The projection: principal components of the updates of all vertices, each with the sign that gives
the first client a positive score; scores divided by a scale; the closest point of the simplex. The scale is one of 100,
up to twice the largest score: the one whose points have the least Riesz energy (s = 2). In every step a point is drawn
uniformly from the simplex. One outside of the region is moved towards the center, to a distance distributed as in a
ball, so that it stays in the simplex, which it may leave in the authors' code. The whole head is in the simplex, bias
included; BatchNorm's statistics are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Batch, Data
from coterie.core.init import networks
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, OWN_ROWS, Protections, refused
from coterie.core.ranges import Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree

DIAMETER = 2.0  # of a simplex in the L1 norm: a region of this radius is all of it
SCALES = 100  # that are tried, evenly spaced up to twice the largest score
CLOSEST = 1e-4  # distance of two points in the energy, at least
FLAT = 1e-4  # length of an axis relative to the longest, below which it is rounding
SMALLEST = 1e-12  # distance or scale to divide by


class Simplex(NamedTuple):
    encoder: Tree
    vertices: Tree  # (M, ...) θ_1 ... θ_M: trained parameters of the heads
    statistics: Tree  # of BatchNorm in the head


class Projection(NamedTuple):
    """From updates to points of the simplex; before it is made, to the center."""

    mean: Tensor  # (P,)
    axes: Tensor  # (M, P)
    scale: Tensor  # ()


class Server(NamedTuple):
    simplex: Simplex
    updates: Tensor  # (m, P) of all vertices, by the clients; zeros before a client's first training
    known: Tensor  # (m,) True: the client has sent an update
    projection: Projection
    centers: Tensor  # (m, M) α_k
    round: Tensor  # () number of completed rounds


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    simplex: Simplex
    center: Tensor  # (M,) α_k
    radius: Tensor  # () ρ


class Up(NamedTuple):
    simplex: Simplex
    samples: Samples  # () n_k


@dataclass(frozen=True)
class Floco(Method[Server, State, Down, Up]):
    endpoints: int = field(default=10, metadata={"help": "vertices of the simplex (M); 1: FedAvg", "low": 1})
    begin: int = field(default=50, metadata={"help": "rounds before clients get regions of their own (τ)", "low": 1})
    radius: float = field(
        default=0.1,
        metadata={"help": "radius of a region in the L1 norm (ρ); 2: the whole simplex", "low": 0, "high": DIAMETER},
    )

    title: ClassVar[str] = "Floco"
    formula: ClassVar[str] = """
        φ(α) = Σ_m α_m φ_m,  α: a random point of the simplex with |α - α_i|₁ ≤ ρ in every step
        (θ, φ₁ … φ_M) ← Σ_i p_i SGD(f_i; θ, φ₁ … φ_M)
        α_i: principal components of the client's update, projected onto the simplex
    """
    family: ClassVar[str] = "mixture"
    results: ClassVar[dict[str, str]] = {"Floco": "pre"}
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused("its server assigns every client a region by its update, which gets no noise"),
        "dp-sample": ALLOWED,  # a region follows from updates, which are private
    }
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        vertices = tree.trained(networks(model, self.endpoints).head)
        statistics = {n: t for n, t in model.start.head.items() if tree.is_statistic(n)}
        m, size, like = len(census.samples), sum(t.numel() for t in vertices.values()), model.mean
        updates, known = like.new_zeros(m, size), torch.zeros_like(like.new_zeros(m), dtype=torch.bool)
        none = Projection(like.new_zeros(size), like.new_zeros(self.endpoints, size), like.new_ones(()))
        simplex = Simplex(model.start.encoder, vertices, statistics)
        return Server(simplex, updates, known, none, projected(updates, none), like.new_zeros(()))

    def server_send(self, server: Server, client: Tensor) -> Down:
        center, known = tree.pick((server.centers, server.known), client)
        own = known & (server.round >= self.begin)
        return Down(server.simplex, center, torch.where(own, center.new_full((), self.radius), DIAMETER))

    def server_greet(self, server: Server) -> Down:
        center = middle(server.simplex)
        return Down(server.simplex, center, center.new_full((), DIAMETER))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        heads = {n: t.new_zeros(self.endpoints, *t.shape) for n, t in tree.trained(model.start.head).items()}
        return State(self.train.start(Simplex(model.start.encoder, heads, {})))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def step(carry: tuple[Simplex, Tree], batch: Batch) -> tuple[Simplex, Tree]:
            shares = drawn(batch, down.center, down.radius)  # α

            def loss(simplex: Simplex, batch: Batch) -> Tensor:
                return model.loss(model(at(simplex, shares), batch.x), batch)

            return self.train.step(carry[0], loss, batch, data.rate, carry[1])

        runs = (
            replace(run, drawn=run.drawn._replace(key=random.derive(data.key, random.DRAW, epoch)))
            for epoch, run in enumerate(self.train.runs(data))
        )
        simplex, momentum = fold((down.simplex, state.momentum), ((step, run) for run in runs))
        return State(momentum if self.train.keep_momentum else {}), Up(simplex, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        moved = tree.apply(torch.sub, server.simplex.vertices, ups.simplex.vertices)  # (S, M, ...)
        sent = torch.cat([t.flatten(1) for t in moved.values()], 1)  # (S, P)
        fixed = server.known[clients] & (server.round >= self.begin)
        updates = server.updates.index_put((clients,), torch.where(fixed[:, None], server.updates[clients], sent))
        known = server.known.index_fill(0, clients, True)
        due = int(server.round) + 1 == self.begin
        projection = fitted(updates[known], self.endpoints) if due else server.projection
        points = torch.where(known[:, None], projected(updates, projection), middle(server.simplex))
        mean = tree.average(ups.simplex, ups.samples)
        return Server(mean, updates, known, projection, points, server.round + 1)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(at(down.simplex, down.center), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(at(server.simplex, middle(server.simplex)), x)

    def server_report(self, server: Server) -> Tree:
        return {"centers": server.centers}


def at(simplex: Simplex, shares: Tensor) -> Weights:
    """The model at a point of the simplex. shares: (M,) α."""
    head = {n: torch.tensordot(shares, t, dims=1) for n, t in simplex.vertices.items()}
    return Weights(simplex.encoder, type(simplex.vertices)(head | simplex.statistics))


def middle(simplex: Simplex) -> Tensor:
    """(M,) the center of the simplex."""
    vertices = next(iter(simplex.vertices.values()))
    return vertices.new_full(vertices.shape[:1], 1 / len(vertices))


def drawn(batch: Batch, center: Tensor, radius: Tensor) -> Tensor:
    """(M,) a random point of the simplex; one outside of the region is moved towards the center, into the region."""
    assert batch.key is not None
    key, vertices = random.derive(batch.key, batch.sample[0]), len(center)
    draws = random.uniform(random.derive(key, torch.arange(vertices + 1, device=center.device)))
    lengths = -(1 - draws[:-1]).log()  # exponential: uniform in the simplex once they sum to 1
    away = (lengths / lengths.sum()).to(center.dtype) - center
    distance = away.abs().sum()
    part = draws[-1].to(center.dtype) ** (1 / max(vertices - 1, 1))  # of ρ, as in a ball of M - 1 dimensions
    return center + torch.where(distance > radius, radius * part / distance.clamp_min(SMALLEST), 1.0) * away


def fitted(updates: Tensor, endpoints: int) -> Projection:
    """The projection of updates (n, P) whose points are farthest apart."""
    mean = updates.double().mean(0)
    away = updates.double() - mean
    _, lengths, axes = torch.linalg.svd(away, full_matrices=False)  # (r,), (r, P), r = min(n, P)
    axes = torch.where(lengths[:, None] > FLAT * lengths[0], axes, 0.0)[:endpoints]
    axes = torch.cat([axes, axes.new_zeros(endpoints - len(axes), axes.shape[1])])
    axes = torch.where((axes @ away[0] < 0)[:, None], -axes, axes)
    scores = away @ axes.T  # (n, M) κ
    steps = torch.arange(1, SCALES + 1, dtype=torch.float64, device=updates.device)
    scales = (2 * scores.abs().max() * steps / SCALES).clamp_min(SMALLEST)
    energies = torch.stack([energy(closest(scores / scale)) for scale in scales])
    found = Projection(mean, axes, scales.index_select(0, energies.argmin()[None])[0])
    return tree.apply(lambda t: t.to(updates.dtype), found)


def projected(updates: Tensor, projection: Projection) -> Tensor:
    """(n, M) points of the simplex for updates (n, P)."""
    return closest((updates - projection.mean) @ projection.axes.T / projection.scale)


def closest(scores: Tensor) -> Tensor:
    """(n, M) the point of the simplex that is closest to each row: max(κ - t, 0), where t makes the sum 1."""
    scores = scores - scores.amax(1, keepdim=True)  # the same point, also for scores that are too large to subtract 1
    ordered = scores.sort(1, descending=True).values
    rank = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
    over = (ordered.cumsum(1) - 1) / rank  # t, if this many entries are positive
    count = (ordered > over).sum(1, keepdim=True)
    return (scores - over.gather(1, count - 1)).clamp_min(0)


def energy(points: Tensor) -> Tensor:
    """() Riesz energy of points (n, M): the sum of 1/d² over all pairs."""
    return torch.pdist(points).clamp_min(CLOSEST).square().reciprocal().sum()
