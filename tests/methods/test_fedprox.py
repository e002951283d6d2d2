"""FedProx against a loop that adds the pull to torch's gradients by hand."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedprox import FedProx
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def plain_client(start: dict, i: int, turn: Turn, data: FederatedData, pull: float, batch_norm: bool) -> dict:  # type: ignore[type-arg]
    net = toy.network(batch_norm).double()
    net.load_state_dict(start, strict=False)
    optimiser = plain.optimiser(net.parameters(), SGD, turn)
    for x, y in plain.batches(data, i, turn, SGD):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for name, p in net.named_parameters():
            p.grad += pull * (p.detach() - start[name])
        optimiser.step()
    return plain.copy(net)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_three_rounds_equal_the_plain_implementation(batch_norm: bool) -> None:
    """With the protocol's momentum and weight decay, which an optimiser of its own elsewhere leaves out."""
    data, net, pull = plain.data(), toy.network(batch_norm).double(), 3.0
    weights = plain.copy(net)
    for joined, turn in plain.ROUNDS:
        models = [plain_client(weights, i, turn, data, pull, batch_norm) for i in joined]
        weights = plain.mean(models, [data.train.sizes[i] for i in joined])
    server, _ = plain.federation(FedProx(train=SGD, pull=pull), data, toy.model(batch_norm=batch_norm))
    plain.assert_close(plain.named(server.weights, net), weights)


def test_without_pull_it_is_fedavg() -> None:
    found, _ = toy.looped(toy.method("fedprox", pull=0.0), toy.model(), toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    toy.assert_same(
        {name: t for name, t in found.items() if name.startswith("server.")},
        {name: t for name, t in averaged.items() if name.startswith("server.")},
    )


def test_pull_keeps_clients_near_what_they_received() -> None:
    start = toy.model().start
    far = [
        sum(float((t - start.encoder[n]).square().sum()) for n, t in server.weights.encoder.items())
        for server, _ in (
            plain.federation(FedProx(train=SGD, pull=pull), plain.data(), toy.model()) for pull in (0.0, 1.0, 10.0)
        )
    ]
    assert far[0] > far[1] > far[2] > 0
