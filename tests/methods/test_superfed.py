"""SuPerFed against two modules a client and a third that is their mixture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import random, tree
from coterie.core.data import FederatedData
from coterie.core.init import redrawn
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import keys, send
from coterie.methods.superfed import SuPerFed, cosine, mixture
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def share(key: Tensor, number: int) -> float:
    """The first 53 random bits of a key as a number in [0, 1)."""
    return float((random.bits(random.derive(key, number), torch.tensor(0)) >> 10).double() * 2.0**-53)


class Plain:
    def __init__(self, data: FederatedData, method: SuPerFed) -> None:
        self.data, self.method, self.number = data, method, 0
        self.shared: Any = toy.network().double()
        local = plain.named(redrawn(toy.model(), 1), self.shared)
        self.nets: list[dict[str, Tensor]] = [dict(local) for _ in data.train.sizes]

    def train(self, i: int, turn: Turn) -> dict[str, Tensor]:
        mixing = self.number >= self.method.begin
        received = plain.copy(self.shared)
        f = {n: t.clone().requires_grad_() for n, t in received.items()}
        w = {n: t.clone().requires_grad_(mixing) for n, t in self.nets[i].items()}
        optimizer: Any = plain.optimiser([*f.values(), *(t for t in w.values() if mixing)], SGD, turn)  # type: ignore[list-item]
        key = keys(plain.SEED, turn, torch.tensor(i))
        x, y = self.data.train.client(i)
        x = (x.double() / 255 - 0.5) / 0.5
        layers = list(dict.fromkeys(n.rpartition(".")[0] for n in f))
        for epoch in range(SGD.local_epochs):
            order = random.shuffle(random.derive(key, random.SHUFFLE, epoch), len(y))
            for index in torch.split(order, SGD.batch_size):
                own = random.derive(key, random.DRAW, epoch, index[0])
                mixed = {}
                for n in f:
                    number = layers.index(n.rpartition(".")[0]) if self.method.by_layer else 0
                    lam = share(own, number) if mixing else 0.0
                    mixed[n] = (1 - lam) * f[n] + lam * w[n]
                optimizer.zero_grad()
                loss = F.cross_entropy(torch.func.functional_call(self.shared, mixed, (x[index],)), y[index])
                loss = loss + self.method.pull / 2 * sum((f[n] - received[n]).square().sum() for n in f)
                if mixing:
                    a, b = (torch.cat([t.flatten() for t in part.values()]) for part in (f, w))
                    loss = loss + self.method.apart * F.cosine_similarity(a, b, dim=0) ** 2
                loss.backward()
                optimizer.step()
        self.nets[i] = {n: t.detach() for n, t in w.items()}
        return {n: t.detach() for n, t in f.items()}

    def round(self, joined: list[int], turn: Turn) -> None:
        trained = [self.train(i, turn) for i in joined]
        self.shared.load_state_dict(plain.mean(trained, [self.data.train.sizes[i] for i in joined]))
        self.number += 1


@pytest.mark.parametrize(("begin", "by_layer"), [(0, False), (0, True), (2, False), (9, True)])
def test_three_rounds_equal_the_plain_implementation(begin: int, by_layer: bool) -> None:
    method = SuPerFed(train=SGD, begin=begin, by_layer=by_layer)
    expected = Plain(plain.data(), method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, expected.data, toy.model())
    plain.assert_close(plain.named(server.weights, expected.shared), plain.copy(expected.shared))
    for i, net in enumerate(expected.nets):
        plain.assert_close(plain.named(clients.states[i].weights, expected.shared), net)


@pytest.mark.parametrize(("pull", "same"), [(0.0, "fedavg"), (0.3, "fedprox")])
def test_before_it_begins_it_is_fedavg_or_fedprox(pull: float, same: str) -> None:
    found, history = toy.looped(toy.method("superfed", begin=99, pull=pull), toy.model(), toy.toy())
    expected, other = toy.looped(toy.method(same, **({"pull": pull} if pull else {})), toy.model(), toy.toy())
    shared = [n for n in found if n.startswith("server.weights")]
    assert toy.distance({n: found[n] for n in shared}, {n: expected[n] for n in shared}) < 1e-12
    assert history.curve("pre") == other.curve("pre")  # the untrained personal model has no part in predictions


def test_a_mixture_by_hand() -> None:
    """Weights of 1 and 5 with a quarter of the personal model: 2. Equal models have a cosine of 1."""
    start = toy.model().start
    one, five = (
        plain.Weights(*({n: torch.full_like(t, v) for n, t in part.items()} for part in start)) for v in (1, 5)
    )
    quarter = dict.fromkeys([n for n, _ in tree.items(start)], torch.tensor(0.25).double())
    assert all((t == 2).all() for t in tree.leaves(mixture(one, five, quarter)))
    assert float(cosine(one, five)) == pytest.approx(1.0)
    zero = tree.apply(torch.zeros_like, one)
    assert float(cosine(one, zero)) == 0


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_predictions_are_those_of_the_mixture(part: float) -> None:
    method, data, model = SuPerFed(train=SGD, begin=0, predict_share=part), plain.data(), toy.model()
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])
    net, (x, _) = toy.network().double(), data.test.client(0)
    f, w = (plain.named(weights, net) for weights in (server.weights, clients.states[0].weights))
    net.load_state_dict({n: (1 - part) * f[n] + part * w[n] for n in f})
    down = method.server_send(server, torch.tensor(0))
    found = method.client_predict(model, clients.states[0], down, x)
    torch.testing.assert_close(found, net((x.double() / 255 - 0.5) / 0.5))
    fresh = method.client_predict(model, clients.states[2], down, x)  # has not taken part: the shared model
    net.load_state_dict(f)
    torch.testing.assert_close(fresh, net((x.double() / 255 - 0.5) / 0.5))


def test_both_models_become_orthogonal() -> None:
    weak, strong = (
        plain.federation(SuPerFed(train=SGD.but(lr=0.01), begin=0, apart=apart), plain.data(), toy.model())[1]
        .states[0]
        .weights
        for apart in (0.0, 50.0)
    )
    start = toy.model().start
    assert abs(float(cosine(start, strong))) < abs(float(cosine(start, weak))) + 1e-3


def test_a_step_of_two_clients_by_hand() -> None:
    """From w = (1, 0) and v = (1, 1), of which every mixture is (1, λ): the loss (1 - y_i)² has the slope g = 2 and -4.

    w' takes 1 - λ of it and v takes λ. cos² = 1/2 has the slopes (0, 1) in w' and (1/2, -1/2) in v. Clients have 1 and
    3 samples, the rate is 0.1 and ν = 2.
    """
    data, model = plain.parabolas(start=(1.0, 0.0))
    sgd = LocalTraining(local_epochs=1, batch_size=3, lr=0.1, momentum=0.0)
    method, joined = SuPerFed(train=sgd, begin=0, apart=2.0), torch.tensor([0, 1])
    clients = Looped(method, model, data, plain.SEED, processes=1)
    begun = method.server_init(model, clients.census)
    own = model.start._replace(head={"weight": torch.tensor([[1.0, 1.0]], dtype=torch.float64)})
    begun = begun._replace(personal=own)
    clients.join(method.server_welcome(begun))
    answers = clients.train(joined, send(method, begun, joined), Turn(0))
    server = method.server_receive(begun, answers.clients, answers.ups)
    expected = torch.zeros(2, dtype=torch.float64)
    for i, (g, count) in enumerate(((2.0, 1), (-4.0, 3))):
        key = random.derive(keys(plain.SEED, Turn(0), torch.tensor(i)), random.DRAW, 0)
        order = random.shuffle(random.derive(keys(plain.SEED, Turn(0), torch.tensor(i)), random.SHUFFLE, 0), count)
        part = share(random.derive(key, order[0]), 0)  # λ
        after = torch.tensor([1 - 0.1 * (part * g + 2 * 0.5), 1 + 0.1 * 2 * 0.5], dtype=torch.float64)
        torch.testing.assert_close(clients.states[i].weights.head["weight"][0], after)
        expected += count / 4 * torch.tensor([1 - 0.1 * (1 - part) * g, -0.1 * 2], dtype=torch.float64)
    torch.testing.assert_close(server.weights.head["weight"][0], expected)
