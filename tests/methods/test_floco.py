"""Floco against modules whose last layer is a sum of vertices, and its projection against cases by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.batch import Batch
from coterie.core.data import FederatedData, Split
from coterie.core.init import redrawn
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.execution.requests import keys
from coterie.methods.floco import DIAMETER, Floco, Projection, closest, drawn, energy, fitted, projected
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def onto_simplex(point: np.ndarray) -> np.ndarray:
    """The closest point of the simplex, by bisection for the number that is subtracted from all entries."""
    low, high = point.min() - 1, point.max()
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - low, 0)


def centers(updates: np.ndarray, vertices: int) -> tuple[np.ndarray, Any]:
    """Points of the simplex for updates (n, P), and the function that makes them, from the covariance of updates."""
    mean = updates.mean(0)
    away = updates - mean
    values, vectors = np.linalg.eigh(away.T @ away)
    kept = [i for i in np.argsort(-values)[:vertices] if values[i] > 1e-8 * values.max()]
    axes = np.zeros((vertices, len(mean)))
    for row, i in enumerate(kept):
        axes[row] = vectors[:, i] * (1 if vectors[:, i] @ away[0] > 0 else -1)
    best, least = 0.0, math.inf
    for step in range(1, 101):
        scale = 2 * np.abs(away @ axes.T).max() * step / 100
        points = [onto_simplex(row / scale) for row in away @ axes.T]
        pairs = [(a, b) for i, a in enumerate(points) for b in points[:i]]
        total = sum(1 / max(float(np.linalg.norm(a - b)), 1e-4) ** 2 for a, b in pairs)
        if total < least * (1 - 1e-12):
            best, least = scale, total

    def point(update: np.ndarray) -> np.ndarray:
        return onto_simplex(axes @ (update - mean) / best)

    return np.stack([point(row) for row in updates]), point


class Plain:
    def __init__(self, data: FederatedData, method: Floco) -> None:
        self.data, self.method, self.number = data, method, 0
        self.net: Any = toy.network().double()
        starts = [toy.model().start, *(redrawn(toy.model(), j) for j in range(1, method.endpoints))]
        self.encoder = dict(toy.model().start.encoder)
        self.heads = {n: torch.stack([s.head[n] for s in starts]) for n in starts[0].head}
        self.updates: dict[int, np.ndarray] = {}
        self.point: Any = None

    def region(self, i: int) -> tuple[Tensor, float]:
        m = self.method.endpoints
        if self.point is None or i not in self.updates:
            return torch.full((m,), 1 / m, dtype=torch.float64), 2.0
        return torch.tensor(self.point(self.updates[i])), self.method.radius

    def train(self, i: int, turn: Turn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        f = {n: t.clone().requires_grad_() for n, t in self.encoder.items()}
        heads = {n: t.clone().requires_grad_() for n, t in self.heads.items()}
        optimizer: Any = plain.optimiser([*f.values(), *heads.values()], SGD, turn)  # type: ignore[list-item]
        key = keys(plain.SEED, turn, torch.tensor(i))
        x, y = self.data.train.client(i)
        x = (x.double() / 255 - 0.5) / 0.5
        center, radius = self.region(i)
        for epoch in range(SGD.local_epochs):
            order = random.shuffle(random.derive(key, random.SHUFFLE, epoch), len(y))
            for index in torch.split(order, SGD.batch_size):
                own = random.derive(key, random.DRAW, epoch, index[0])
                bits = [random.bits(random.derive(own, j), torch.tensor(0)) >> 10 for j in range(len(center) + 1)]
                *uniform, last = (int(b) * 2.0**-53 for b in bits)
                lengths = torch.tensor([-math.log(1 - u) for u in uniform], dtype=torch.float64)
                away = lengths / lengths.sum() - center
                distance = float(away.abs().sum())
                if distance > radius:
                    away = away / distance * radius * last ** (1 / (len(center) - 1))
                alpha = center + away
                head = {f"{len(self.net) - 1}.{n}": sum(a * v for a, v in zip(alpha, t)) for n, t in heads.items()}  # noqa: B905
                optimizer.zero_grad()
                F.cross_entropy(torch.func.functional_call(self.net, f | head, (x[index],)), y[index]).backward()
                optimizer.step()
        return {n: t.detach() for n, t in f.items()}, {n: t.detach() for n, t in heads.items()}

    def round(self, joined: list[int], turn: Turn) -> None:
        trained = [self.train(i, turn) for i in joined]
        for i, (_, heads) in zip(joined, trained, strict=True):
            if self.point is None or i not in self.updates:
                self.updates[i] = torch.cat([(self.heads[n] - t).flatten() for n, t in heads.items()]).numpy()
        sizes = [self.data.train.sizes[i] for i in joined]
        self.encoder = plain.mean([f for f, _ in trained], sizes)
        self.heads = plain.mean([heads for _, heads in trained], sizes)
        self.number += 1
        if self.number == self.method.begin:
            sent = [self.updates[i] for i in sorted(self.updates)]
            _, self.point = centers(np.stack(sent), self.method.endpoints)


@pytest.mark.parametrize(("endpoints", "begin", "radius"), [(3, 1, 0.3), (10, 2, 0.1), (2, 1, 0.0), (4, 9, 0.1)])
def test_three_rounds_equal_the_plain_implementation(endpoints: int, begin: int, radius: float) -> None:
    method = Floco(train=SGD, endpoints=endpoints, begin=begin, radius=radius)
    expected = Plain(plain.data(), method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, _ = plain.federation(method, expected.data, toy.model())
    plain.assert_close(server.simplex.encoder, expected.encoder)
    plain.assert_close(server.simplex.vertices, expected.heads)
    for i in range(5):
        down = method.server_send(server, torch.tensor(i))
        center, size = expected.region(i)
        torch.testing.assert_close(down.center, center, rtol=0, atol=1e-10)
        assert float(down.radius) == size


@pytest.mark.parametrize("begin", [1, 99])
def test_one_endpoint_is_fedavg(begin: int) -> None:
    found, history = toy.looped(toy.method("floco", endpoints=1, begin=begin), toy.model(), toy.toy())
    expected, other = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    for name in [n for n in expected if n.startswith("server.weights.encoder.")]:
        torch.testing.assert_close(found[name.replace("weights", "simplex")], expected[name], rtol=0, atol=1e-12)
    for name in [n for n in expected if n.startswith("server.weights.head.")]:
        torch.testing.assert_close(
            found[name.replace("weights.head", "simplex.vertices")][0], expected[name], rtol=0, atol=1e-12
        )
    assert history.curve("pre") == other.curve("pre")


def test_regions_are_the_whole_simplex_until_they_are_assigned() -> None:
    method = Floco(train=SGD, endpoints=3, begin=2, radius=0.2)
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    for rounds in (0, 1):
        server, _ = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:rounds])
        for i in range(5):
            down = method.server_send(server, torch.tensor(i))
            assert float(down.radius) == DIAMETER
            torch.testing.assert_close(down.center, third)
    server, _ = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:2])
    downs = [method.server_send(server, torch.tensor(i)) for i in range(5)]
    assert [float(down.radius) for down in downs] == [0.2] * 5  # all have trained in the first two rounds
    assert len({tuple(down.center.tolist()) for down in downs}) == 5
    new = method.server_greet(server)
    assert float(new.radius) == DIAMETER
    torch.testing.assert_close(new.center, third)


def test_a_region_stays_and_a_late_client_gets_one_by_its_first_update() -> None:
    method = Floco(train=SGD, endpoints=3, begin=1)
    found = [plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:rounds])[0] for rounds in (1, 2, 3)]
    assert found[0].known.tolist() == [True, True, False, True, False]
    for client in (0, 1, 3):
        assert torch.equal(found[0].centers[client], found[2].centers[client])
    for client in (2, 4):
        assert float(method.server_send(found[0], torch.tensor(client)).radius) == DIAMETER
        assert float(method.server_send(found[1], torch.tensor(client)).radius) == method.radius
        assert torch.equal(found[1].centers[client], found[2].centers[client])


def test_a_radius_of_the_diameter_is_no_region() -> None:
    """Local training is the same with and without an assignment; predictions are at other points."""
    early, late = (
        plain.federation(Floco(train=SGD, endpoints=3, begin=begin, radius=DIAMETER), plain.data(), toy.model())[0]
        for begin in (1, 9)
    )
    assert tree.flatten(early.simplex).keys() == tree.flatten(late.simplex).keys()
    for a, b in zip(tree.leaves(early.simplex), tree.leaves(late.simplex), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_closest_point_by_hand() -> None:
    given = torch.tensor([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.8, -3.0]], dtype=torch.float64)
    expected = torch.tensor(
        [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.6, 0.4, 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(closest(given), expected)
    far = torch.tensor([[0.0, 1e20, 1.0]])  # 1e20 - 1 is 1e20
    assert closest(far).tolist() == [[0.0, 1.0, 0.0]]


def test_the_projection_by_hand() -> None:
    """Two clients at 3 and -1 on one axis: mean 1, scores 2 and -2. With every scale up to 2 their points are the two
    ends of the simplex, which are farthest apart."""
    updates = torch.tensor([[3.0, 0.0], [-1.0, 0.0]]).double()
    found = fitted(updates, 2)
    torch.testing.assert_close(found.mean, torch.tensor([1.0, 0.0]).double())
    torch.testing.assert_close(found.axes, torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())
    torch.testing.assert_close(projected(updates, found), torch.eye(2).double())
    late = projected(torch.tensor([[1.0, 7.0]]).double(), found)  # the mean on this axis
    torch.testing.assert_close(late, torch.full((1, 2), 0.5).double())


def test_points_of_like_clients_are_close_and_their_energy_is_least() -> None:
    draw = torch.Generator().manual_seed(0)
    kinds = torch.eye(3, 8).double() * 5
    updates = (kinds[[0, 0, 1, 1, 2, 2]] + 0.5 * torch.randn(6, 8, generator=draw)).double()
    found = fitted(updates, 3)
    points = projected(updates, found)
    torch.testing.assert_close(points.sum(1), torch.ones(6).double())
    expected, _ = centers(updates.numpy(), 3)
    torch.testing.assert_close(points, torch.tensor(expected), rtol=0, atol=1e-10)
    apart = torch.cdist(points, points)
    for a, b in ((0, 1), (2, 3), (4, 5)):
        others = [c for c in range(6) if c not in (a, b)]
        assert apart[a, b] < apart[a, others].min()
    for factor in (0.5, 2.0):
        other = Projection(found.mean, found.axes, found.scale * factor)
        assert energy(projected(updates, other)) >= energy(points)


@pytest.mark.parametrize("updates", [torch.zeros(3, 4), torch.ones(1, 4)], ids=["equal", "one client"])
def test_updates_without_any_difference_are_the_center(updates: Tensor) -> None:
    torch.testing.assert_close(projected(updates, fitted(updates, 3)), torch.full((len(updates), 3), 1 / 3))


def test_drawn_points_are_in_the_region_and_in_the_simplex() -> None:
    batch = Batch(torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    center = torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64)
    seeds = [batch._replace(key=random.seed_key(seed)) for seed in range(300)]
    points = torch.stack([drawn(one, center, torch.tensor(0.2, dtype=torch.float64)) for one in seeds])
    away = (points - center).abs().sum(1)
    assert (points >= 0).all()
    assert (away <= 0.2 + 1e-12).all()
    assert (away < 0.1).double().mean() == pytest.approx(1 / 4, abs=0.07)  # uniform in two dimensions
    torch.testing.assert_close(points.sum(1), torch.ones(300).double())
    whole = torch.stack([drawn(one, center, torch.tensor(DIAMETER).double()) for one in seeds])
    torch.testing.assert_close(
        whole.mean(0), torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=0.06
    )  # uniform
    torch.testing.assert_close(
        whole.var(0), torch.full((3,), 1 / 18, dtype=torch.float64), rtol=0, atol=0.012
    )  # Dirichlet(1)


def test_predictions_are_those_of_the_center() -> None:
    method, data, model = Floco(train=SGD, endpoints=3, begin=1), plain.data(), toy.model()
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])
    net, (x, _) = toy.network().double(), data.test.client(0)

    def outputs(shares: Tensor) -> Tensor:
        vertices, last = server.simplex.vertices, len(net) - 1  # type: ignore[arg-type]
        head = {f"{last}.{n}": torch.einsum("m,m...->...", shares, t) for n, t in vertices.items()}
        net.load_state_dict(server.simplex.encoder | head)
        made: Tensor = net((x.double() / 255 - 0.5) / 0.5)
        return made

    down = method.server_send(server, torch.tensor(0))
    found = method.client_predict(model, clients.states[0], down, x)
    torch.testing.assert_close(found, outputs(server.centers[0]))
    torch.testing.assert_close(
        method.server_predict(model, server, x), outputs(torch.full((3,), 1 / 3, dtype=torch.float64))
    )


def test_batchnorm_in_the_head_keeps_one_set_of_statistics() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, toy.CLASSES))
    size = math.prod(toy.SHAPE)
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.ReLU(), head)
    model = make_model(net, toy.SHAPE, toy.CLASSES, head="3").to("cpu", torch.float64)
    method = toy.method("floco", endpoints=1)
    data = toy.toy(train=(12, 20, 10, 14, 8))  # no batch of one sample
    found, _ = toy.looped(method, model, data)
    expected, _ = toy.looped(toy.method("fedavg"), model, data)
    assert found["server.simplex.statistics.0.running_mean"].shape == (8,)
    for name in ("0.running_mean", "0.running_var"):
        torch.testing.assert_close(found[f"server.simplex.statistics.{name}"], expected[f"server.weights.head.{name}"])
    several = toy.method("floco", endpoints=3)
    looped, _ = toy.looped(several, model, data)
    assert toy.distance(looped, toy.stacked(several, model, data)[0]) < 1e-10


def test_clients_of_two_kinds_get_heads_that_fit_them() -> None:
    """Every second client has other labels for the same inputs, which one model cannot have both."""
    draw = torch.Generator().manual_seed(0)
    x, kind = torch.randn(6 * 60, 4, generator=draw), torch.arange(6 * 60) // 60 % 2
    held = Split(x, ((x[:, 0] > 0).long() + kind) % 2, (60,) * 6)
    data = FederatedData("kinds", 2, held, held)
    torch.manual_seed(0)
    model = make_model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), (4,), 2)
    train = LocalTraining(local_epochs=2, batch_size=20, lr=0.2)
    scores = {}
    for begin in (3, 99):
        _, history = toy.stacked(Floco(train=train, endpoints=3, begin=begin), model, data, rounds=20, join_ratio=1.0)
        scores[begin] = history.curve("pre")[-1][1]
    assert scores[3] > 0.85
    assert scores[99] < 0.65
