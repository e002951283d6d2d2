"""FedAvgM against a loop written from the paper's update rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedavgm import FedAvgM, Up
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def trained(weights: dict[str, Tensor], client: int, turn: Turn, batch_norm: bool) -> dict[str, Tensor]:
    """A client's model after torch's SGD."""
    net = toy.network(batch_norm).double()
    net.load_state_dict(weights, strict=False)
    optimiser = plain.optimiser(net.parameters(), SGD, turn)
    for x, y in plain.batches(plain.data(), client, turn, SGD):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    return plain.copy(net)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_three_rounds_equal_the_plain_implementation(batch_norm: bool) -> None:
    """v <- β v + Δw, w <- w - v; running statistics of BatchNorm are the clients' mean, so variances stay positive."""
    net, sizes = toy.network(batch_norm).double(), plain.data().train.sizes
    weights = plain.copy(net)
    speed = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for joined, turn in plain.ROUNDS:
        mean = plain.mean([trained(weights, i, turn, batch_norm) for i in joined], [sizes[i] for i in joined])
        speed = {n: 0.9 * v + (weights[n] - mean[n]) for n, v in speed.items()}
        weights = {n: weights[n] - speed[n] if n in speed else mean[n] for n in weights}
    server, _ = plain.federation(FedAvgM(train=SGD), plain.data(), toy.model(batch_norm=batch_norm))
    plain.assert_close(plain.named(server.weights, net), weights)


def test_without_inertia_it_is_fedavg() -> None:
    found, _ = plain.federation(FedAvgM(train=SGD, inertia=0.0), plain.data(), toy.model(batch_norm=True))
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model(batch_norm=True))
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) < 1e-14


def test_two_clients_by_hand() -> None:
    """From 0, clients with 1 and 3 samples send 4 and 8: the mean is 7, again 7 from 7, and the server ends at 13.3."""
    method, start = FedAvgM(), tree.apply(torch.zeros_like, toy.model().start)
    server = plain.federation(method, plain.data(), toy.model(), [])[0]._replace(weights=start)
    ups = Up(tree.stack([tree.apply(lambda t, v=v: t + v, start) for v in (4.0, 8.0)]), torch.tensor([1.0, 3.0]))
    first = method.server_receive(server, torch.tensor([0, 1]), ups)
    assert first.weights.head["bias"].tolist() == pytest.approx([7.0] * 4)
    second = method.server_receive(first, torch.tensor([0, 1]), ups)  # Δw = 0, v = 0.9 * (-7)
    assert second.weights.head["bias"].tolist() == pytest.approx([7.0 + 0.9 * 7.0] * 4)
