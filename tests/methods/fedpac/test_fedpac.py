"""FedPAC against a second implementation, written from the paper's equations with loops over classes and pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import keys, send
from coterie.methods.fedpac.method import FedPAC, Server, Up
from tests import toy

SIZES = (13, 20, 9, 31, 8)
SEED = 5


def fedpac(**changes: Any) -> FedPAC:
    return FedPAC(
        train=LocalTraining(local_epochs=3, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3), **changes
    )


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
        self.own: list[dict[int, Tensor]] = [{} for _ in data.train.sizes]  # against concept shift
        self.weights: list[list[float]] = []

    def round(self, number: int) -> None:
        clients = range(self.data.num_clients)
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
            self.own[i] = self.weighted_prototypes(self.weights[i], ups)
        for i in clients:
            self.heads[i].load_state_dict(
                {n: sum(self.weights[i][j] * ups[j]["head"][n] for j in clients) for n in ups[0]["head"]}
            )

    def weighted_prototypes(self, weights: list[float], ups: list[dict[str, Any]]) -> dict[int, Tensor]:
        found = {}
        for k in range(toy.CLASSES):
            owners = [
                (a * up["counts"][k], up["centroids"][k])
                for a, up in zip(weights, ups, strict=True)
                if k in up["counts"]
            ]
            total = sum(share for share, _ in owners)
            if total > 0:
                found[k] = torch.stack([share / total * centroid for share, centroid in owners]).sum(0)
        return found

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
            prototypes = self.own[i] if self.method.personal_prototypes else self.prototypes
            if prototypes and self.method.align:
                targets = torch.stack([prototypes.get(k, means[k]) for k in y[index].tolist()])
                loss = loss + self.method.align * F.mse_loss(features, targets)
            return loss

        self.train(top, self.method.head_lr, self.method.head_epochs, key, n, head_loss)
        self.train(net, self.method.train.lr, self.method.train.local_epochs, key, n, encoder_loss)
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
            for index in torch.split(random.shuffle(random.derive(key, random.SHUFFLE, epoch), n), sgd.batch_size):
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
    import daqp  # not on every machine with a GPU

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
    everyone = torch.arange(data.num_clients)
    for number in range(rounds):
        answers = clients.train(everyone, send(method, server, everyone), Turn(number))
        server = method.server_receive(server, answers.clients, answers.ups)
    return server


@pytest.mark.long
@pytest.mark.parametrize(
    "ablation",
    [{}, {"combine": False}, {"align": 0.0}, {"align": 0.0, "combine": False}, {"personal_prototypes": True}],
    ids=["both", "fa", "cc", "none", "shift"],
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
    if method.personal_prototypes:
        for i, own in enumerate(plain.own):
            assert server.prototypes[i].any(1).nonzero()[:, 0].tolist() == list(own)
            for k, prototype in own.items():
                torch.testing.assert_close(server.prototypes[i, k], prototype, rtol=1e-6, atol=1e-7)
    else:
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


def two_concepts(method: FedPAC) -> tuple[Server, Up]:
    """For clients 0 and 1 class 0 lies at 1, for 2 and 3 at 9. Client 1 weighs little, and lacks class 1."""
    model = toy.model()
    server = method.server_init(model, Looped(method, model, toy.toy(), 0, processes=1).census)
    prototypes = torch.zeros(4, toy.CLASSES, model.dim, dtype=torch.float64)
    prototypes[:2, 0], prototypes[2:, 0], prototypes[0, 1], prototypes[1, 0] = 1.0, 9.0, 4.0, 2.0
    counts = torch.zeros(4, toy.CLASSES, dtype=torch.float64)
    counts[:, 0], counts[0, 1] = torch.tensor([6.0, 1.0, 5.0, 5.0], dtype=torch.float64), 3.0
    parts = [tree.apply(lambda t: torch.stack([t] * 4), part) for part in model.start]
    variance = torch.tensor([1.0, 99.0, 1.0, 1.0], dtype=torch.float64)  # α_01 = 1 / 100, by 1 / variance
    near = torch.tensor([0.0, 0.0, 1e4, 1e4], dtype=torch.float64)[:, None, None].expand_as(prototypes)
    return server, Up(*parts, prototypes, near, variance, counts)


def test_personal_prototypes_stay_within_a_concept() -> None:
    method = fedpac(personal_prototypes=True)
    server, ups = two_concepts(method)
    after = method.server_receive(server, torch.tensor([0, 1, 3, 4]), ups)
    own = (0.99 * 6 * 1.0 + 0.01 * 1 * 2.0) / (0.99 * 6 + 0.01 * 1)
    for client, value in ((0, own), (1, own), (3, 9.0), (4, 9.0)):
        sent = method.server_send(after, torch.tensor(client)).prototypes
        torch.testing.assert_close(sent[0], torch.full((8,), value, dtype=torch.float64))
        assert sent[1].any() == (client < 2)  # nobody to whom 3 and 4 listen has class 1
    assert not after.prototypes[2].any()  # was not there
    mixed = fedpac()
    server, ups = two_concepts(mixed)
    plain = mixed.server_receive(server, torch.tensor([0, 1, 3, 4]), ups).prototypes[0]
    torch.testing.assert_close(plain, torch.full((8,), (6 * 1.0 + 2.0 + 90.0) / 17, dtype=torch.float64))


def test_a_little_share_of_a_class_is_a_whole_prototype() -> None:
    """α_ij n_jk may be far below 1 and must still be divided by itself."""
    method = fedpac(personal_prototypes=True)
    server, ups = two_concepts(method)
    prototypes, counts = ups.prototypes.clone(), ups.counts.clone()
    prototypes[1, 2], counts[1, 2] = 5.0, 1.0  # only client 1 has class 2: its share for client 0 is 1 / 100
    after = method.server_receive(
        server, torch.tensor([0, 1, 3, 4]), ups._replace(prototypes=prototypes, counts=counts)
    )
    torch.testing.assert_close(after.prototypes[0, 2], torch.full((8,), 5.0, dtype=torch.float64))


def test_personal_prototypes_stacked_equal_looped() -> None:
    method = toy.method("fedpac", personal_prototypes=True)
    expected, history = toy.looped(method, toy.model(), toy.toy())
    found, _ = toy.stacked(method, toy.model(), toy.toy())
    assert toy.distance(expected, found) < 1e-10
    _, usual = toy.looped(toy.method("fedpac"), toy.model(), toy.toy())
    assert [r.bytes_down for r in history] == [r.bytes_down for r in usual]  # each is sent its own, no more
