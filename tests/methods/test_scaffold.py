"""SCAFFOLD against a loop written from Algorithm 1, and against the optimum that it must reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.scaffold import SCAFFOLD, Up
from tests import plain, toy

TRAINING = {"local_epochs": 2, "batch_size": 8, "lr": 0.05, "weight_decay": 1e-3}


class Plain:
    """Algorithm 1, option II. No momentum; steps are counted as they are taken."""

    def __init__(self, data: FederatedData, sgd: LocalTraining, batch_norm: bool, by_samples: bool) -> None:
        self.data, self.sgd, self.batch_norm, self.by_samples = data, sgd, batch_norm, by_samples
        net = toy.network(batch_norm).double()
        self.weights = plain.copy(net)
        self.control = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
        self.controls = [dict(self.control) for _ in data.train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        ups = [self.client(i, turn) for i in joined]
        sizes = [self.data.train.sizes[i] if self.by_samples else 1 for i in joined]
        move = plain.mean([moved for moved, _ in ups], sizes)
        self.weights = {n: w + move[n] for n, w in self.weights.items()}
        for n in self.control:
            self.control[n] = self.control[n] + sum(change[n] for _, change in ups) / self.data.num_clients

    def client(self, i: int, turn: Turn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        net = toy.network(self.batch_norm).double()
        net.load_state_dict(self.weights, strict=False)
        optimiser, steps = plain.optimiser(net.parameters(), self.sgd, turn, momentum=0.0), 0
        for x, y in plain.batches(self.data, i, turn, self.sgd):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            for n, p in net.named_parameters():
                p.grad += self.control[n] - self.controls[i][n]  # type: ignore[operator]
            optimiser.step()
            steps += 1
        eta, trained, old = self.sgd.lr * turn.rate, plain.copy(net), self.controls[i]
        new = {n: old[n] - self.control[n] + (self.weights[n] - trained[n]) / (steps * eta) for n in old}
        self.controls[i] = new
        return {n: trained[n] - w for n, w in self.weights.items()}, {n: new[n] - old[n] for n in new}


def by_name(control: tree.Tree, batch_norm: bool = False) -> dict[str, Tensor]:
    last = len(toy.network(batch_norm)) - 1  # type: ignore[arg-type]
    return {n.removeprefix("encoder.").replace("head.", f"{last}."): t for n, t in control.items()}


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("by_samples", [False, True])
def test_three_rounds_equal_the_plain_implementation(drop_last: bool, by_samples: bool, batch_norm: bool) -> None:
    """Clients of unlike size take unlike numbers of steps; the learning rate falls; the protocol has momentum."""
    data, sgd = plain.data(), LocalTraining(**TRAINING, momentum=0.5, drop_last=drop_last)  # type: ignore[arg-type]
    expected = Plain(data, sgd, batch_norm, by_samples)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    method = SCAFFOLD(train=sgd, weight_by_samples=by_samples)
    server, clients = plain.federation(method, data, toy.model(batch_norm=batch_norm))
    plain.assert_close(plain.named(server.weights, toy.network(batch_norm)), expected.weights)
    plain.assert_close(by_name(server.control, batch_norm), expected.control)
    for i, control in enumerate(expected.controls):
        plain.assert_close(by_name(clients.states[i].control, batch_norm), control)


def test_while_controls_are_zero_it_is_fedavg() -> None:
    """In round 0 they are, for every client; without momentum, and with FedAvg's weights, nothing differs."""
    sgd, data, first = LocalTraining(**TRAINING), plain.data(), plain.ROUNDS[:1]  # type: ignore[arg-type]
    found, _ = plain.federation(SCAFFOLD(train=sgd, weight_by_samples=True), data, toy.model(), first)
    averaged, _ = plain.federation(FedAvg(train=sgd), data, toy.model(), first)
    toy.assert_same(tree.flatten(found.weights), tree.flatten(averaged.weights))


def test_momentum_of_the_protocol_is_not_used() -> None:
    """Else option II would take the longer way for a larger gradient."""
    with_it, without = (toy.looped(toy.method("scaffold", momentum=m), toy.model(), toy.toy())[0] for m in (0.9, 0.0))
    toy.assert_same(with_it, without)


def test_the_first_control_is_the_mean_gradient() -> None:
    """One step on all samples: c_i⁺ is the gradient there, whatever the learning rate."""
    data = plain.data()
    method = SCAFFOLD(train=LocalTraining(local_epochs=1, batch_size=31, lr=0.03))
    _, clients = plain.federation(method, data, toy.model(), [([0, 1, 2, 3, 4], Turn(0, 0.1))])
    for i in range(5):
        net = toy.network().double()
        ((x, y),) = plain.batches(data, i, Turn(0), method.train)
        F.cross_entropy(net(x), y).backward()
        gradient = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        for name, c in by_name(clients.states[i].control).items():
            torch.testing.assert_close(c, gradient[name], rtol=1e-6, atol=1e-10)


def test_the_servers_control_is_the_mean_over_all_clients() -> None:
    """Over m, not over those who took part; and clients remember theirs (elsewhere they do not)."""
    server, clients = plain.federation(SCAFFOLD(train=LocalTraining(**TRAINING)), plain.data(), toy.model())  # type: ignore[arg-type]
    own = [clients.states[i].control for i in range(5)]
    plain.assert_close(server.control, tree.average(tree.stack(own), torch.ones(5)))
    assert all(any(t.any() for t in control.values()) for control in own)


def up(values: list[float]) -> Any:
    def fill(t: Tensor) -> Tensor:
        return torch.stack([torch.full_like(t, v) for v in values])

    start = toy.model().start
    return Up(tree.apply(fill, start), tree.apply(fill, tree.trained(start)))


@pytest.mark.parametrize(("by_samples", "expected"), [(False, 2.0), (True, (1.0 * 20 + 3.0 * 8) / 28)])
def test_clients_count_alike_unless_asked(by_samples: bool, expected: float) -> None:
    method = SCAFFOLD(weight_by_samples=by_samples)
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    after = method.server_receive(server, torch.tensor([1, 4]), up([1.0, 3.0]))  # 20 and 8 samples
    assert after.weights.head["bias"].tolist() == pytest.approx([expected] * 4)
    assert after.control["head.bias"].tolist() == pytest.approx([(1.0 + 3.0) / 5] * 4)


def test_controls_may_be_averaged_over_participants() -> None:
    method = SCAFFOLD(controls_of_participants=True)
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    after = method.server_receive(server, torch.tensor([1, 4]), up([1.0, 3.0]))  # two of five
    assert after.control["head.bias"].tolist() == pytest.approx([(1.0 + 3.0) / 2] * 4)


@pytest.mark.long
def test_it_reaches_the_optimum_of_all_where_fedavg_does_not() -> None:
    data, model = plain.line()
    sgd = LocalTraining(local_epochs=5, batch_size=12, lr=0.5, weight_decay=0.05)
    rounds = [([0, 1, 2], Turn(t)) for t in range(60)]
    server, _ = plain.federation(SCAFFOLD(train=sgd), data, model, rounds)
    averaged, _ = plain.federation(FedAvg(train=sgd), data, model, rounds)
    assert plain.slope(server.weights, data, 0.05) < 1e-12
    assert plain.slope(averaged.weights, data, 0.05) > 0.01
