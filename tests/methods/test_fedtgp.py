"""FedTGP against modules, dictionaries of classes and a loss written out in logarithms of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedtgp import FedTGP, Prototypes, Server, distance, processed
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


class Table(nn.Module):
    """The prototypes as a module: a table and two dense layers."""

    def __init__(self, begun: Prototypes) -> None:
        super().__init__()
        self.table = nn.Embedding(toy.CLASSES, 8).double()
        self.middle, self.out = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        with torch.no_grad():
            self.table.weight.copy_(begun.table)
            for name in ("middle", "out"):
                getattr(self, name).weight.copy_(begun.layers[f"{name}.weight"])
                getattr(self, name).bias.copy_(begun.layers[f"{name}.bias"])

    def forward(self) -> Tensor:
        found: Tensor = self.out(self.middle(self.table(torch.arange(toy.CLASSES))).relu())
        return found


def contrast(z: Tensor, k: int, table: Tensor, margin: float) -> Tensor:
    """-log of eq. (7), for one class mean."""
    away = [(z - row).norm() for row in table]
    own = torch.exp(-(away[k] + margin))
    others = sum(torch.exp(-a) for j, a in enumerate(away) if j != k)
    return -torch.log(own / (own + others))


class Plain:
    def __init__(self, begun: Prototypes, align: float, margin: float, epochs: int, batch: int) -> None:
        self.data, self.align, self.margin, self.epochs, self.batch = plain.data(), align, margin, epochs, batch
        self.nets: list[Any] = [toy.network().double() for _ in self.data.train.sizes]
        self.table = Table(begun)
        self.known: dict[int, Tensor] = {}
        self.margins: list[float] = []

    def train(self, i: int, turn: Turn) -> dict[int, Tensor]:
        net = self.nets[i]
        optimizer = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimizer.zero_grad()
            z = net[:-1](x)
            target = torch.stack([self.known.get(k, z[row].detach()) for row, k in enumerate(y.tolist())])
            (F.cross_entropy(net[-1](z), y) + self.align * F.mse_loss(z, target)).backward()
            optimizer.step()
        return plain.class_means(net, self.data, i)

    def round(self, joined: list[int], turn: Turn) -> None:
        sent = [self.train(i, turn) for i in joined]
        classes = sorted({k for means in sent for k in means})
        centers = {k: torch.stack([means[k] for means in sent if k in means]).mean(0) for k in classes}
        widest = max(float((centers[a] - centers[b]).norm()) for a in classes for b in classes)
        self.margins.append(min(widest, self.margin))
        optimizer = torch.optim.SGD(self.table.parameters(), lr=0.01)
        for z, y in plain.server_batches(sent, turn, self.epochs, self.batch):
            optimizer.zero_grad()
            rows = [contrast(a, k, self.table(), self.margins[-1]) for a, k in zip(z, y.tolist(), strict=True)]
            torch.stack(rows).mean().backward()
            optimizer.step()
        rows = self.table().detach()
        self.known = {k: rows[k] for k in {*self.known, *classes}}


@pytest.mark.long
@pytest.mark.parametrize("margin", [100.0, 0.2])
def test_three_rounds_equal_the_plain_implementation(margin: float) -> None:
    """Round 0 has nothing to align to; client 0 lacks classes. One margin adapts, the other is cut."""
    method = FedTGP(train=SGD, align=3.0, margin=margin, server_epochs=4, server_batch=5)
    begun, _ = plain.federation(method, plain.data(), toy.model(), [])
    expected = Plain(begun.trained, 3.0, margin, 4, 5)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    assert (max(expected.margins) == 0.2) == (margin == 0.2)
    server, clients = plain.federation(method, plain.data(), toy.model())
    for i, net in enumerate(expected.nets):
        plain.assert_close(plain.named(clients.states[i].weights, net), plain.copy(net))
    torch.testing.assert_close(processed(server.trained), expected.table().detach())
    found = method.server_send(server, torch.tensor(0)).prototypes
    for k in range(toy.CLASSES):
        torch.testing.assert_close(found[k], expected.known.get(k, torch.zeros_like(found[k])))


def test_without_alignment_it_is_local_training() -> None:
    found, _ = toy.looped(toy.method("fedtgp", align=0.0, server_epochs=2), toy.model(), toy.toy())
    alone, _ = toy.looped(toy.method("local"), toy.model(), toy.toy())
    for i in range(5):
        prefix = f"states.{i}.weights."
        toy.assert_same(*({n: t for n, t in run.items() if n.startswith(prefix)} for run in (found, alone)))


def test_the_margin_of_two_clients_by_hand() -> None:
    """Class 0 at (0, 0) and (2, 0), so its center is (1, 0); class 1 at (1, 3) only; classes 2 and 3 are absent."""
    means = torch.zeros(2, 4, 8).double()
    means[1, 0, 0], means[0, 1, 0], means[0, 1, 1], means[0, 2, 0] = 2.0, 1.0, 3.0, 99.0
    counts = torch.tensor([[5.0, 1.0, 0.0, 0.0], [70.0, 0.0, 0.0, 0.0]]).double()  # clients count alike
    assert float(FedTGP().adapted(means, counts)) == pytest.approx(3.0)
    assert float(FedTGP(margin=2.0).adapted(means, counts)) == pytest.approx(2.0)
    assert float(FedTGP().adapted(means[1:], counts[1:])) == 0  # one class has no margin


def test_classes_that_no_client_sent_have_no_prototype() -> None:
    method = FedTGP(train=SGD, server_epochs=1)
    data = toy.toy(train=(9, 9), test=(1, 1), augmented=False)
    data.train.y.copy_(data.train.y % 2)
    server, _ = plain.federation(method, data, toy.model(), [([0, 1], Turn(0))])
    found = method.server_send(server, torch.tensor(0)).prototypes
    assert found[:2].any(1).all()
    assert not found[2:].any()
    again, _ = plain.federation(method, data, toy.model(), [])
    assert not method.server_send(again, torch.tensor(0)).prototypes.any()  # nothing to align to in round 0


def test_training_pulls_prototypes_apart() -> None:
    """Means of two classes that nearly coincide: their trained prototypes are farther apart than the means."""
    method, model = FedTGP(server_epochs=300, server_lr=0.05), toy.model()
    means = torch.zeros(3, 4, 8).double()
    means[:, 1, 0] = 0.1
    counts = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).double().expand(3, 4)
    begun, _ = plain.federation(method, plain.data(), model, [])
    server = Server(begun.trained, begun.seen, means, counts)
    rows = processed(method.server_train(model, server, plain.random.server_key(0, 0)).trained)
    assert float(distance(rows[0], rows[1])) > 0.2


def test_the_distance_of_equal_points_has_a_gradient() -> None:
    point = torch.ones(3, dtype=torch.float64, requires_grad=True)
    distance(point, torch.ones(3).double()).backward()
    assert point.grad is not None
    assert not point.grad.any()
