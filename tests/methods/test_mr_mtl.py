"""MR-MTL against plain loops written from its objective, and at the two ends of its pull."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.mr_mtl import MRMTL, Up
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


class Plain:
    """min over w_k: F_k(w_k) + λ/2 ||w_k - w̄||²; w̄ is the mean of what the participants sent."""

    def __init__(self, data: FederatedData, pull: float) -> None:
        self.data, self.pull = data, pull
        self.mean = plain.copy(toy.network().double())
        self.personal = [self.mean for _ in data.train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        for i in joined:
            self.personal[i] = self.client(i, turn)
        self.mean = plain.mean([self.personal[i] for i in joined], [1] * len(joined))

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        net = toy.network().double()
        net.load_state_dict(self.personal[i])
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            apart = sum((p - self.mean[n]).square().sum() for n, p in net.named_parameters())
            (F.cross_entropy(net(x), y) + self.pull / 2 * apart).backward()
            optimiser.step()
        return plain.copy(net)


def test_three_rounds_equal_the_plain_implementation() -> None:
    data = plain.data()
    expected = Plain(data, pull=0.7)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(MRMTL(train=SGD, pull=0.7), data, toy.model())
    plain.assert_close(plain.named(server.weights, toy.network()), expected.mean)
    for i, own in enumerate(expected.personal):
        plain.assert_close(plain.named(clients.states[i].personal, toy.network()), own)


def part(found: tree.Tree, prefix: str) -> tree.Tree:
    return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}


def test_without_pull_it_is_local() -> None:
    found, _ = toy.looped(toy.method("mr-mtl", pull=0.0), toy.model(), toy.toy())
    local, _ = toy.looped(toy.method("local"), toy.model(), toy.toy())
    for i in range(5):
        toy.assert_same(part(found, f"states.{i}.personal."), part(local, f"states.{i}.weights."))


def test_all_clients_count_equally() -> None:
    """Two clients with weights 1 and 4: the mean is 2.5, whatever their samples."""
    start = toy.model().start
    ups = Up(tree.apply(lambda t: torch.stack([torch.full_like(t, v) for v in (1.0, 4.0)]), start))
    server, _ = plain.federation(MRMTL(), plain.data(), toy.model(), [])
    after = MRMTL().server_receive(server, torch.tensor([1, 4]), ups)
    assert all(t.unique().tolist() == [2.5] for t in tree.leaves(after))


def test_one_step_by_hand() -> None:
    """Softmax regression at zero, two classes: the slope of the loss is known, and the pull adds λ (w - w̄)."""
    data, model = plain.line(clients=2)
    sgd = LocalTraining(local_epochs=1, batch_size=12, lr=0.5)
    full = [([0, 1], Turn(0)), ([0, 1], Turn(1))]
    server, clients = plain.federation(MRMTL(train=sgd, pull=0.3), data, model, full)
    after = []
    for i in (0, 1):
        x, y = data.train.client(i)
        bias = torch.zeros(2, dtype=torch.float64)
        weight = torch.zeros(2, 3, dtype=torch.float64)
        after.append([weight, bias, x, F.one_hot(y, 2).double()])
    for _ in full:
        mean = [sum(own[part] for own in after) / 2 for part in (0, 1)]
        for own in after:
            weight, bias, x, one_hot = own
            wrong = ((x @ weight.T + bias).softmax(1) - one_hot) / 12
            own[0] = weight - 0.5 * (wrong.T @ x + 0.3 * (weight - mean[0]))
            own[1] = bias - 0.5 * (wrong.sum(0) + 0.3 * (bias - mean[1]))
    for i in (0, 1):
        torch.testing.assert_close(clients.states[i].personal.head["weight"], after[i][0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(clients.states[i].personal.head["bias"], after[i][1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(server.weights.head["weight"], (after[0][0] + after[1][0]) / 2)


@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_a_newcomer_starts_from_the_mean(pull: float) -> None:
    method = MRMTL(train=SGD, pull=pull)
    server, clients = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:1])
    joined = method.client_init(clients.model, None, method.server_welcome(server))  # type: ignore[arg-type]
    toy.assert_same(tree.flatten(joined.personal), tree.flatten(server.weights))
