"""FedPAC against a second implementation, written from the paper's equations with loops over classes and pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import daqp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.clients import Looped, Turn
from coterie.clients.base import keys, send
from coterie.core import order, tree
from coterie.core.local import Sgd
from coterie.core.samples import FederatedData
from coterie.methods.fedpac import FedPAC, Server, Up
from tests import toy

SIZES = (13, 20, 9, 31, 8)
SEED = 5


def fedpac(**changes: Any) -> FedPAC:
    return FedPAC(train=Sgd(epochs=3, batch=8, lr=0.05, momentum=0.5, weight_decay=1e-3), **changes)


def encoder() -> nn.Sequential:
    return toy.network().double()[:-1]  # type: ignore[index, no-any-return]


def head() -> nn.Module:
    return toy.network().double()[-1]  # type: ignore[index, no-any-return]


class Plain:
    """The algorithm as the authors run it: modules, torch's optimiser, dictionaries of classes."""

    def __init__(self, data: FederatedData, method: FedPAC) -> None:
        self.data, self.method = data, method
        self.encoder, self.heads = encoder(), [head() for _ in data.train.sizes]
        self.prototypes: dict[int, Tensor] = {}
        self.weights: list[list[float]] = []

    def round(self, number: int) -> None:
        clients = range(self.data.clients)
        ups = [self.client(i, number) for i in clients]
        samples = self.data.train.sizes
        self.encoder.load_state_dict(
            {n: sum(samples[i] / sum(samples) * ups[i]["encoder"][n] for i in clients) for n in ups[0]["encoder"]}
        )
        for k in range(toy.CLASSES):
            owners = [up for up in ups if k in up["centroids"]]
            total = sum(up["counts"][k] for up in owners)
            if owners:
                self.prototypes[k] = torch.stack([up["counts"][k] / total * up["centroids"][k] for up in owners]).sum(0)
        self.weights = [self.combination(i, ups) for i in clients]
        for i in clients:
            self.heads[i].load_state_dict(
                {n: sum(self.weights[i][j] * ups[j]["head"][n] for j in clients) for n in ups[0]["head"]}
            )

    def client(self, i: int, number: int) -> dict[str, Any]:
        x, y = self.data.train.client(i)
        x, n = (x.double() / 255 - 0.5) / 0.5, len(y)
        key = keys(SEED, Turn(number), torch.tensor(i))
        net, top = encoder(), self.heads[i]
        net.load_state_dict(self.encoder.state_dict())
        with torch.no_grad():
            z = net(x)
        means = {k: z[y == k].mean(0) for k in range(toy.CLASSES) if (y == k).any()}
        moments, variance = {}, 0.0
        for k, mean in means.items():
            members = z[y == k]
            moments[k] = len(members) / n * mean
            second = sum(float(row @ row) for row in members) / len(members)
            variance += len(members) / n * second - float(moments[k] @ moments[k])

        def head_loss(index: Tensor) -> Tensor:
            return F.cross_entropy(top(z[index]), y[index])

        def encoder_loss(index: Tensor) -> Tensor:
            features = net(x[index])
            loss = F.cross_entropy(top(features), y[index])
            if self.prototypes and self.method.align:
                targets = torch.stack([self.prototypes.get(k, means[k]) for k in y[index].tolist()])
                loss = loss + self.method.align * F.mse_loss(features, targets)
            return loss

        self.train(top, self.method.head_lr, self.method.head_epochs, key, n, head_loss)
        self.train(net, self.method.train.lr, self.method.train.epochs, key, n, encoder_loss)
        with torch.no_grad():
            z = net(x)
        return {
            "encoder": net.state_dict(),
            "head": {name: p.detach().clone() for name, p in top.named_parameters()},
            "centroids": {k: z[y == k].mean(0) for k in means},
            "counts": {k: float((y == k).sum()) for k in means},
            "moments": moments,
            "variance": variance / n,
        }

    def train(
        self, part: nn.Module, lr: float, epochs: int, key: Tensor, n: int, loss: Callable[[Tensor], Tensor]
    ) -> None:
        sgd = self.method.train
        optimiser = torch.optim.SGD(part.parameters(), lr=lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
        for epoch in range(epochs):
            for index in torch.split(order.shuffle(order.fold(key, order.SHUFFLE, epoch), n), sgd.batch):
                optimiser.zero_grad()
                loss(index).backward()
                optimiser.step()

    def combination(self, i: int, ups: list[dict[str, Any]]) -> list[float]:
        m, nothing = len(ups), torch.zeros(8, dtype=torch.float64)
        h = [[up["moments"].get(k, nothing) for k in range(toy.CLASSES)] for up in ups]
        matrix = np.diag([up["variance"] for up in ups])
        for j in range(m):
            for other in range(m):
                for k in range(toy.CLASSES):
                    matrix[j, other] += float((h[i][k] - h[j][k]) @ (h[i][k] - h[other][k]))
        weights = solve(matrix) if self.method.combine else np.eye(m)[i]
        kept = [w if w > self.method.cut else 0.0 for w in weights.tolist()]
        return [w / sum(kept) for w in kept]


def solve(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """min a^T M a on the simplex, by daqp, at the scale that its tolerances are made for."""
    m = len(matrix)
    scaled = np.ascontiguousarray(matrix / np.trace(matrix) * m)
    above, below = np.append(np.full(m, 1e30), 1.0), np.append(np.zeros(m), 1.0)
    x, _, flag, _ = daqp.solve(scaled, np.zeros(m), np.ones((1, m)), above, below, np.zeros(m + 1, dtype=np.int32))
    assert flag > 0
    return np.asarray(x)


def federation(data: FederatedData, method: FedPAC, rounds: int) -> Server:
    clients = Looped(method, toy.model(), data, SEED, processes=1)
    server = method.server_init(clients.model, clients.census)
    clients.join({})
    everyone = torch.arange(data.clients)
    for number in range(rounds):
        answers = clients.train(everyone, send(method, server, everyone), Turn(number))
        server = method.server_receive(server, answers.clients, answers.ups)
    return server


@pytest.mark.parametrize(
    "ablation",
    [{}, {"combine": False}, {"align": 0.0}, {"align": 0.0, "combine": False}],
    ids=["both", "fa", "cc", "none"],
)
def test_three_rounds_equal_the_plain_implementation(ablation: dict[str, Any]) -> None:
    """Round 0 has no alignment; client 0 lacks classes; in rounds 1 and 2 everything is at work."""
    data, method = toy.toy(train=SIZES, augmented=False), fedpac(**ablation)
    plain = Plain(data, method)
    for number in range(3):
        plain.round(number)
    server = federation(data, method, rounds=3)
    for name, value in plain.encoder.state_dict().items():
        torch.testing.assert_close(server.encoder[name], value, rtol=1e-7, atol=1e-9)
    for k, prototype in plain.prototypes.items():
        torch.testing.assert_close(server.prototypes[k], prototype, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(server.head_weights, torch.tensor(plain.weights, dtype=torch.float64), rtol=0, atol=1e-6)
    for i, top in enumerate(plain.heads):
        for name, value in top.state_dict().items():
            torch.testing.assert_close(server.heads[name][i], value, rtol=1e-6, atol=1e-7)


def up(moments: Tensor, variance: Tensor) -> Up:
    m = len(variance)
    some = torch.ones(m, 4, dtype=torch.float64)
    return Up({"w": some}, {"w": some}, some, moments, variance, some)


def test_weights_are_cut_and_still_sum_to_one() -> None:
    moments = torch.tensor([[[0.0]], [[0.0]], [[1e3]]], dtype=torch.float64)
    variance = torch.tensor([1.0, 999.5, 1.0], dtype=torch.float64)  # the second is worth 1/1000.5 of the first
    weights = fedpac().head_weights(up(moments, variance))
    assert weights[0, 1] == 0
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64))
    assert fedpac(cut=1e-4).head_weights(up(moments, variance))[0, 1] > 0


def test_each_client_gets_its_own_combination() -> None:
    """Two groups: nobody is given a head, or a weight, that belongs to someone else (a known error elsewhere)."""
    method, model = fedpac(), toy.model()
    server = method.server_init(model, Looped(method, model, toy.toy(), 0, processes=1).census)
    ids = torch.tensor([1, 2, 4])
    far = torch.zeros(3, toy.CLASSES, model.dim, dtype=torch.float64)
    far[1] += 1e3  # client 2 is unlike 1 and 4
    counts = torch.full((3, toy.CLASSES), 5.0, dtype=torch.float64)
    heads = tree.apply(lambda t: torch.stack([t * 0 + i for i in (1.0, 2.0, 4.0)]), model.start.head)
    encoders = tree.apply(lambda t: torch.stack([t] * 3), model.start.encoder)
    ups = Up(encoders, heads, far, far, torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64), counts)
    after = method.server_receive(server, ids, ups)
    expected = torch.tensor([[0.75, 0, 0.25], [0, 1, 0], [0.75, 0, 0.25]], dtype=torch.float64)  # by 1 / variance
    torch.testing.assert_close(after.head_weights, expected)
    values = [float(method.server_send(after, i).head["bias"][0]) for i in ids]
    assert values == pytest.approx([0.75 * 1 + 0.25 * 4, 2.0, 0.75 * 1 + 0.25 * 4])
    for i in (0, 3):  # those who were not there keep theirs
        toy.assert_same(tree.pick(after.heads, i), model.start.head)


def test_a_class_that_nobody_has_keeps_its_prototype() -> None:
    data = toy.toy(train=(13,), test=(7,), augmented=False)  # client 0 has classes 0 and 1 only
    server = federation(data, fedpac(), rounds=1)
    assert server.prototypes[:2].any(1).all()
    assert not server.prototypes[2:].any()
