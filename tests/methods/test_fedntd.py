"""FedNTD against a plain loop over samples, and against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import FederatedData, Split
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedntd import FedNTD
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def not_true(logits: Tensor, label: int, temperature: float) -> Tensor:
    """Softmax over the classes other than the true one, which is cut out."""
    return (torch.cat([logits[:label], logits[label + 1 :]]) / temperature).softmax(0)


def train(
    data: FederatedData, i: int, weights: dict[str, Tensor], turn: Turn, beta: float, tau: float
) -> dict[str, Tensor]:
    net, teacher = toy.network().double(), toy.network().double()
    net.load_state_dict(weights)
    teacher.load_state_dict(weights)
    optimiser = plain.optimiser(net.parameters(), SGD, turn)
    for x, y in plain.batches(data, i, turn, SGD):
        optimiser.zero_grad()
        logits, fixed = net(x), teacher(x).detach()
        total = F.cross_entropy(logits, y, reduction="sum")
        for u, v, label in zip(logits, fixed, y.tolist(), strict=True):
            q, g = not_true(u, label, tau), not_true(v, label, tau)
            total = total - beta * sum(g[c] * (q[c] / g[c]).log() for c in range(len(g)))
        (total / len(y)).backward()
        optimiser.step()
    return plain.copy(net)


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (0.4, 3.0)])
def test_rounds_equal_the_plain_implementation(beta: float, tau: float) -> None:
    data, rounds = plain.data(), plain.ROUNDS[:2]
    weights = plain.copy(toy.network().double())
    for joined, turn in rounds:
        weights = plain.mean(
            [train(data, i, weights, turn, beta, tau) for i in joined], [data.train.sizes[i] for i in joined]
        )
    server, _ = plain.federation(FedNTD(train=SGD, distill=beta, temperature=tau), data, toy.model(), rounds)
    plain.assert_close(plain.named(server.weights, toy.network()), weights)


def test_without_distillation_it_is_fedavg() -> None:
    found, _ = plain.federation(FedNTD(train=SGD, distill=0.0), plain.data(), toy.model())
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model())
    toy.assert_same(tree.flatten(found.weights), tree.flatten(averaged.weights))


def test_the_default_distills() -> None:
    found, _ = plain.federation(FedNTD(train=SGD), plain.data(), toy.model())
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model())
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) > 1e-4


def test_with_two_classes_it_is_fedavg() -> None:
    """One class is left beside the true one, and its probability is 1 for both models."""
    data, model = plain.line()
    sgd = LocalTraining(local_epochs=2, batch_size=5, lr=0.5)
    everyone = [([0, 1, 2], Turn(0))]
    found, _ = plain.federation(FedNTD(train=sgd), data, model, everyone)
    averaged, _ = plain.federation(FedAvg(train=sgd), data, model, everyone)
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) < 1e-14


def test_two_clients_by_hand() -> None:
    """One sample x = 1 each, three classes, weights only: two steps, of which the second has a student that moved."""
    x = torch.ones(2, 1, dtype=torch.float64)
    held = Split(x, torch.tensor([0, 1]), (1, 1))
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        network[1].weight.copy_(torch.tensor([[0.0], [1.0], [2.0]]))
    data = FederatedData("two", 3, held, held)
    model = make_model(network, (1,), 3).to("cpu", torch.float64)
    method = FedNTD(train=LocalTraining(local_epochs=2, batch_size=1, lr=0.5), distill=2.0)
    server, _ = plain.federation(method, data, model, [([0, 1], Turn(0))])

    def softmax(u: dict[int, float]) -> dict[int, float]:
        total = sum(math.exp(v) for v in u.values())
        return {c: math.exp(v) / total for c, v in u.items()}

    ends = []
    for label in (0, 1):
        w = {0: 0.0, 1: 1.0, 2: 2.0}
        others = [c for c in w if c != label]
        teacher = softmax({c: w[c] for c in others})
        for _ in range(2):
            p, q = softmax(w), softmax({c: w[c] for c in others})
            slope = {c: p[c] - (c == label) for c in w}
            for c in others:
                slope[c] += 2.0 * (q[c] - teacher[c])
            w = {c: w[c] - 0.5 * slope[c] for c in w}
        ends.append(w)
    expected = [(ends[0][c] + ends[1][c]) / 2 for c in range(3)]
    assert server.weights.head["weight"].flatten().tolist() == pytest.approx(expected, abs=1e-12)
