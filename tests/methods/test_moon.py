"""MOON against a loop written from equation (3) of the paper."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.method import Census
from coterie.core.model import make_model
from coterie.core.task import Classification
from coterie.core.tasks import Segmentation
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


def test_the_first_round_is_fedavg() -> None:
    """Both models are the initial one, so the loss is log 2 and has no gradient."""
    first = plain.ROUNDS[:1]
    found, _ = plain.federation(MOON(train=SGD), plain.data(), toy.model(), first)
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model(), first)
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) < 1e-12


@pytest.mark.parametrize("pixels", [False, True], ids=["vector", "pixels"])
def test_one_step_of_two_clients_by_hand(pixels: bool) -> None:
    """z = (1, 0) = z of the shared model, and a head of zeros, through which the task has no gradient in z.

    Client 0 has z' = (0, 1): s = 1, s' = 0, and the slope of ℓ in z is σ((s' - s) / τ) / τ · (0, 1), here
    2 / (1 + e²). Client 1 has z' = (-1, 0), where the cosine does not change. They have 1 and 3 samples. Pixels are
    three, each with z as its features.
    """
    layer = partial(nn.Conv2d, kernel_size=1, bias=False) if pixels else partial(nn.Linear, bias=False)
    start = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    network = nn.Sequential(layer(2, 2), layer(2, 2)).double()
    with torch.no_grad():
        for one, weight in zip(network, (start, torch.zeros(2, 2)), strict=True):
            one.weight.copy_(weight.view_as(one.weight))
    places = (1, 3) if pixels else ()
    task = Segmentation(2) if pixels else Classification(2)
    model = make_model(network, (2, *places), task, label=places).to("cpu", torch.float64)

    method = MOON(train=LocalTraining(local_epochs=1, batch_size=3, lr=0.1, momentum=0.0), contrast=3.0)
    server = method.server_init(model, Census(torch.tensor([1, 3]), torch.zeros(2, 0)))
    down, ups = method.server_send(server, torch.tensor(0)), []
    for count, before in ((1, [[0.0, 0.0], [1.0, 0.0]]), (3, [[-1.0, 0.0], [0.0, 0.0]])):
        x = torch.zeros(count, 2, *places, dtype=torch.float64)
        x[:, 0] = 1.0
        y, rate = torch.zeros(count, *places, dtype=torch.int64), torch.ones((), dtype=torch.float64)
        data = Data(x, y, random.seed_key(0), rate, 0 if pixels else 2, Transform(), alone=True)
        previous = {"0.weight": torch.tensor(before, dtype=torch.float64).view_as(network[0].weight)}
        state = method.client_init(model, data, {})._replace(previous=previous)
        trained, up = method.client_train(model, state, down, data)
        toy.assert_same(trained.previous, up.weights.encoder)  # what the next round contrasts with
        ups.append(up)
    first, second = (up.weights.encoder["0.weight"].flatten().tolist() for up in ups)
    step = -0.1 * 3.0 * 2 / (1 + math.exp(2))
    assert first == pytest.approx([1.0, 0.0, step, 1.0])
    assert second == pytest.approx([1.0, 0.0, 0.0, 1.0])
    shared = method.server_receive(server, torch.tensor([0, 1]), tree.stack(ups)).weights
    assert shared.encoder["0.weight"].flatten().tolist() == pytest.approx([1.0, 0.0, step / 4, 1.0])
    assert shared.head["weight"].flatten().tolist() == pytest.approx([0.05, 0.0, -0.05, 0.0])
