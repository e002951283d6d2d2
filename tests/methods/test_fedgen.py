"""FedGen against modules, torch's Adam and loops over clients' heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.execution.requests import keys
from coterie.methods.fedgen import LABEL, NOISE, FedGen, sameness
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
SMALL: dict[str, Any] = {"noise": 3, "hidden_units": 6, "server_steps": 4, "server_batch": 5, "server_lr": 0.02}


class Maker(nn.Module):
    def __init__(self, begun: tree.Tree) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(3 + toy.CLASSES, 6).double(), nn.Linear(6, 8).double()
        self.load_state_dict(begun)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        given = torch.cat([noise, torch.eye(toy.CLASSES, dtype=torch.float64)[y]], 1)
        found: Tensor = self.out(self.hidden(given).relu())
        return found


def draws(key: Tensor, numbers: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Labels and noise; the numbers are data, so they are taken from where they are made."""
    own = random.derive(key, numbers)
    return random.categories(random.derive(own, LABEL), shares), random.normals(random.derive(own, NOISE), 3)


class Plain:
    def __init__(self, method: FedGen, begun: tree.Tree) -> None:
        self.method, self.data = method, plain.data()
        self.net: Any = toy.network().double()
        self.maker = Maker(begun)
        self.adam = torch.optim.Adam(self.maker.parameters(), lr=method.server_lr)
        self.shares: Tensor | None = None

    def train(self, i: int, turn: Turn) -> Any:
        net: Any = toy.network().double()
        net.load_state_dict(self.net.state_dict())
        optimizer, key = plain.optimiser(net.parameters(), SGD, turn), keys(plain.SEED, turn, torch.tensor(i))
        x, y = self.data.train.client(i)
        x = (x.double() / 255 - 0.5) / 0.5
        for epoch in range(SGD.local_epochs):
            order = random.shuffle(random.derive(key, random.SHUFFLE, epoch), len(y))
            for index in torch.split(order, SGD.batch_size):
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x[index]), y[index])
                if self.shares is not None:
                    labels, noise = draws(random.derive(key, random.DRAW, epoch), index, self.shares)
                    z = self.maker(noise, labels).detach()
                    loss = loss + self.method.distill * F.cross_entropy(net[-1](z), labels)
                loss.backward()
                optimizer.step()
        return net

    def round(self, joined: list[int], turn: Turn) -> None:
        nets = [self.train(i, turn) for i in joined]
        sizes = [self.data.train.sizes[i] for i in joined]
        self.net.load_state_dict(plain.mean([plain.copy(net) for net in nets], sizes))
        labels = torch.cat([self.data.train.client(i)[1] for i in joined])
        self.shares = torch.bincount(labels, minlength=toy.CLASSES).double() / len(labels)
        steps, size = self.method.server_steps, self.method.server_batch
        key = random.server_key(plain.SEED, turn.round)
        y, noise = draws(key, torch.arange(steps * size), self.shares)
        order = random.shuffle(random.derive(key, random.SHUFFLE, 0), steps * size)
        for index in torch.split(order, size):
            z = self.maker(noise[index], y[index])
            ensemble = sum(net[-1](z) for net in nets) / len(nets)
            loss = F.cross_entropy(ensemble, y[index])
            pairs = [
                ((noise[a] - noise[b]) ** 2).mean() * (z[i] - z[j]).abs().mean()
                for i, a in enumerate(index) for j, b in enumerate(index)
            ]  # fmt: skip
            loss = loss + self.method.diversity * torch.exp(-torch.stack(pairs).mean())
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()


@pytest.mark.long
@pytest.mark.parametrize(("distill", "diversity"), [(1.0, 1.0), (0.4, 0.0)])
def test_three_rounds_equal_the_plain_implementation(distill: float, diversity: float) -> None:
    """Nothing is distilled in round 0; Adam goes on from round to round; client 0 lacks classes."""
    method = FedGen(train=SGD, distill=distill, diversity=diversity, **SMALL)
    begun, _ = plain.federation(method, plain.data(), toy.model(), [])
    expected = Plain(method, begun.generator)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, _ = plain.federation(method, plain.data(), toy.model())
    plain.assert_close(server.generator, {n: p.detach() for n, p in expected.maker.named_parameters()})
    gap = toy.distance(plain.named(server.weights, expected.net), plain.copy(expected.net))
    assert gap < 1e-9  # Adam divides by the size of gradients, so rounding grows
    assert toy.distance(server.generator, begun.generator) > 1e-2


def test_without_distillation_it_is_fedavg() -> None:
    found, _ = toy.looped(toy.method("fedgen", distill=0.0, **SMALL), toy.model(), toy.toy())
    expected, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    common = found.keys() & expected.keys()
    assert sum("server.weights" in n for n in common) == 6
    assert toy.distance({n: found[n] for n in common}, {n: expected[n] for n in common}) < 1e-12


def test_the_first_round_is_fedavg() -> None:
    one = {"rounds": 1}
    found, _ = toy.looped(toy.method("fedgen", **SMALL), toy.model(), toy.toy(), **one)
    expected, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy(), **one)
    common = [n for n in found if "server.weights" in n]
    assert toy.distance({n: found[n] for n in common}, {n: expected[n] for n in common}) < 1e-12


def test_heads_and_counts_of_two_clients_by_hand() -> None:
    """The label shares are those of both together; the ensemble has both heads, the model is their mean."""
    method = FedGen(train=SGD.but(local_epochs=0), **SMALL)
    data = toy.toy(train=(3, 9), test=(1, 1), augmented=False)
    server, _ = plain.federation(method, data, toy.model(), [([0, 1], Turn(0))])
    y = data.train.y
    assert server.labels.tolist() == pytest.approx([float((y == k).sum()) / 12 for k in range(toy.CLASSES)])
    assert server.heads["bias"].shape == (2, toy.CLASSES)
    plain.assert_close(plain.named(server.weights, toy.network()), plain.copy(toy.network().double()))


def test_the_generator_learns_what_the_heads_recognize() -> None:
    """Heads that read class k from feature k: after training, generated features of class k are read as k."""
    method = FedGen(server_steps=300, server_lr=0.01, server_batch=32)
    model = toy.model()
    begun, _ = plain.federation(method, plain.data(), model, [])
    head = {"weight": torch.eye(4, 8).double(), "bias": torch.zeros(4).double()}
    heads = tree.apply(lambda t: torch.stack([t, 2 * t]), head)
    server = begun._replace(heads=heads, labels=torch.tensor([0.5, 0.3, 0.2, 0.0]).double())
    after = method.server_train(model, server, random.server_key(0, 0))
    y = torch.arange(3).repeat(50)
    noise = torch.randn(150, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (FedGen().generated(after.generator, y, noise)[:, :4].argmax(1) == y).double().mean() > 0.95


def test_diversity_falls_with_the_distance_of_features() -> None:
    noise = torch.tensor([[0.0], [2.0]]).double()
    same, apart = torch.zeros(2, 1).double(), torch.tensor([[0.0], [3.0]]).double()
    assert float(sameness(noise, same)) == 1
    assert float(sameness(noise, apart)) == pytest.approx(float(torch.exp(torch.tensor(-(4.0 * 3 * 2) / 4))))


def test_absent_labels_are_not_drawn_and_shares_are_kept() -> None:
    draw = random.derive(random.seed_key(3), torch.arange(20_000))
    found = random.categories(draw, torch.tensor([1.0, 0.0, 6.0, 3.0, 0.0]))
    shares = torch.bincount(found, minlength=5).double() / 20_000
    assert shares.tolist() == pytest.approx([0.1, 0, 0.6, 0.3, 0], abs=0.01)
    normal = random.normals(draw, 3)
    assert normal.mean(0).abs().max() < 0.03
    assert (torch.cov(normal.T) - torch.eye(3)).abs().max() < 0.03
    torch.testing.assert_close(random.normals(draw[7:9], 3), normal[7:9])  # a key's numbers do not depend on others
