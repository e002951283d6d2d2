"""FedLC against a plain loop, with each client's own class counts and with classes that a client lacks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedlc import FedLC
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def train(data: FederatedData, i: int, weights: dict[str, Tensor], turn: Turn, margin: float) -> dict[str, Tensor]:
    """One client: only the classes it has are in the softmax, in a loop over samples and classes."""
    y_all = data.train.client(i)[1].tolist()
    present = sorted(set(y_all))
    net = toy.network().double()
    net.load_state_dict(weights)
    optimiser = plain.optimiser(net.parameters(), SGD, turn)
    for x, y in plain.batches(data, i, turn, SGD):
        optimiser.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for logits, label in zip(net(x), y.tolist(), strict=True):
            u = {c: logits[c] - margin / y_all.count(c) ** 0.25 for c in present}
            total = total + torch.logsumexp(torch.stack(list(u.values())), 0) - u[label]
        (total / len(y)).backward()
        optimiser.step()
    return plain.copy(net)


def test_three_rounds_equal_the_plain_implementation() -> None:
    """Client 0 lacks half of the classes. Counts pooled over the clients would give another result."""
    data = plain.data()
    weights = plain.copy(toy.network().double())
    for joined, turn in plain.ROUNDS:
        weights = plain.mean(
            [train(data, i, weights, turn, 1.5) for i in joined], [data.train.sizes[i] for i in joined]
        )
    server, _ = plain.federation(FedLC(train=SGD, margin=1.5), data, toy.model())
    plain.assert_close(plain.named(server.weights, toy.network()), weights)


def test_without_margin_it_is_fedavg() -> None:
    """Also for a client that lacks classes: they are not excluded then."""
    found, _ = plain.federation(FedLC(train=SGD, margin=0.0), plain.data(), toy.model())
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model())
    toy.assert_same(tree.flatten(found.weights), tree.flatten(averaged.weights))


def test_margins_by_hand() -> None:
    found = FedLC(margin=2.0).margins(torch.tensor([16.0, 81.0, 1.0, 0.0]))
    assert found.tolist() == pytest.approx([1.0, 2 / 3, 2.0, 1e9])


def test_one_step_of_two_clients_by_hand() -> None:
    """Softmax regression at zero: the first slope of the biases follows from the margins alone."""
    data, model = plain.line(clients=2)
    method = FedLC(train=LocalTraining(local_epochs=1, batch_size=12, lr=1.0), margin=3.0)
    server, _ = plain.federation(method, data, model, [([0, 1], Turn(0))])
    moves = []
    for i in (0, 1):
        ones = int(data.train.client(i)[1].sum())
        a, b = (math.exp(-3.0 * n**-0.25) if n else 0.0 for n in (12 - ones, ones))
        moves.append(ones / 12 - b / (a + b))  # of the bias of class 1: share of the class - its softmax
    assert moves[0] != moves[1]
    expected = torch.tensor([-sum(moves) / 2, sum(moves) / 2], dtype=torch.float64)
    torch.testing.assert_close(server.weights.head["bias"], expected, rtol=1e-10, atol=1e-12)


def test_the_row_of_an_absent_class_does_not_move() -> None:
    """Client 0 has classes 0 and 1 only; FedAvg pushes the others down."""
    alone = [([0], Turn(0))]
    sgd = LocalTraining(local_epochs=1, batch_size=8, lr=0.05)
    start = toy.model().start.head
    found, _ = plain.federation(FedLC(train=sgd), plain.data(), toy.model(), alone)
    averaged, _ = plain.federation(FedAvg(train=sgd), plain.data(), toy.model(), alone)
    for name, before in start.items():
        assert torch.equal(found.weights.head[name][2:], before[2:])
        assert not torch.equal(found.weights.head[name][:2], before[:2])
        assert not torch.equal(averaged.weights.head[name][2:], before[2:])


def test_predictions_are_not_calibrated() -> None:
    model, x = toy.model(), plain.data().test.x[:4]
    server, _ = plain.federation(FedLC(train=SGD), plain.data(), model, [])
    assert torch.equal(FedLC(train=SGD).server_predict(model, server, x), model(model.start, x))
