"""MOON against a loop written from equation (3) of the paper."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.moon import MOON
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def features(net: nn.Module, x: Tensor) -> Tensor:
    return nn.Sequential(*list(net.children())[:-1])(x)


class Plain:
    def __init__(self, contrast: float, temperature: float, batch_norm: bool) -> None:
        self.contrast, self.temperature, self.batch_norm = contrast, temperature, batch_norm
        self.shared = toy.network(batch_norm).double()
        self.previous = [copy.deepcopy(self.shared) for _ in plain.data().train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        sizes = plain.data().train.sizes
        mean = plain.mean([self.client(i, turn) for i in joined], [sizes[i] for i in joined])
        self.shared.load_state_dict(mean, strict=False)

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        net, shared, previous = copy.deepcopy(self.shared).train(), self.shared.eval(), self.previous[i].eval()
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(plain.data(), i, turn, SGD):
            optimiser.zero_grad()
            z = features(net, x)
            with torch.no_grad():
                near, far = features(shared, x), features(previous, x)
            up, down = (torch.exp(F.cosine_similarity(z, other) / self.temperature) for other in (near, far))
            loss = F.cross_entropy(net[-1](z), y) - self.contrast * torch.log(up / (up + down)).mean()  # type: ignore[index]
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.previous[i] = net
        return plain.copy(net)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_three_rounds_equal_the_plain_implementation(batch_norm: bool) -> None:
    """Clients that skip a round keep the model of their last one."""
    expected = Plain(2.0, 0.3, batch_norm)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    method = MOON(train=SGD, contrast=2.0, temperature=0.3)
    server, clients = plain.federation(method, plain.data(), toy.model(batch_norm=batch_norm))
    plain.assert_close(plain.named(server.weights, expected.shared), plain.copy(expected.shared))
    for i, net in enumerate(expected.previous):
        encoder = {n: t for n, t in plain.copy(net).items() if n in clients.states[i].previous}
        plain.assert_close(clients.states[i].previous, encoder)


def test_without_contrast_it_is_fedavg() -> None:
    found, _ = toy.looped(toy.method("moon", contrast=0.0), toy.model(), toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    weights = [name for name in averaged if name.startswith("server.weights")]
    toy.assert_same({n: found[n] for n in weights}, {n: averaged[n] for n in weights})


def test_the_default_contrasts() -> None:
    """Elsewhere the default is 0, which is FedAvg."""
    found, _ = plain.federation(MOON(train=SGD), plain.data(), toy.model())
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model())
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) > 1e-4


def test_the_loss_by_hand() -> None:
    """Features along the shared model's and opposite to the previous one's: log(1 + e^((-1 - 1) / τ)).

    In the first round both are the initial model, so the loss is log 2 and has no gradient.
    """
    near, far = torch.tensor(1.0 / 0.5), torch.tensor(-1.0 / 0.5)
    assert float(F.softplus(far - near)) == pytest.approx(math.log(1 + math.exp(-4)))
    first = plain.ROUNDS[:1]
    found, _ = plain.federation(MOON(train=SGD), plain.data(), toy.model(), first)
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model(), first)
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) < 1e-12
