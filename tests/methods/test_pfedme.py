"""pFedMe against a loop with modules, written from Algorithm 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Stacked, Turn
from coterie.execution.requests import send
from coterie.methods.pfedme import pFedMe
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.02, momentum=0.5, weight_decay=1e-2)


class Plain:
    def __init__(self, data: FederatedData, method: pFedMe, batch_norm: bool = False) -> None:
        self.data, self.method, self.batch_norm = data, method, batch_norm
        self.weights = plain.copy(toy.network(batch_norm).double())
        self.personal = [dict(self.weights) for _ in data.train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        models = [self.client(i, turn) for i in joined]
        mean, beta = plain.mean(models, [self.data.train.sizes[i] for i in joined]), self.method.server_step
        self.weights = {n: (1 - beta) * w + beta * mean[n] for n, w in self.weights.items()}

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        sgd, pull = self.method.train, self.method.pull
        eta = sgd.lr * turn.rate
        eta_p = (self.method.personal_lr or sgd.lr) * turn.rate
        theta = toy.network(self.batch_norm).double()
        theta.load_state_dict(self.weights, strict=False)
        local = {n: p.detach().clone() for n, p in theta.named_parameters()}
        for x, y in plain.batches(self.data, i, turn, sgd):
            for _ in range(self.method.steps):
                theta.zero_grad()
                F.cross_entropy(theta(x), y).backward()
                with torch.no_grad():
                    for n, p in theta.named_parameters():
                        p -= eta_p * (p.grad + pull * (p - local[n]) + sgd.weight_decay * p)  # type: ignore[operator]
            with torch.no_grad():
                for n, p in theta.named_parameters():
                    local[n] = local[n] - eta * pull * (local[n] - p)
        copied = plain.copy(theta) | local  # what is no parameter: BatchNorm's statistics
        self.personal[i] = copied if self.method.use_local else plain.copy(theta)
        return copied


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(
    "settings", [{}, {"use_local": True}, {"steps": 2, "pull": 3.0, "personal_lr": 0.01, "server_step": 0.5}]
)
def test_three_rounds_equal_the_plain_implementation(settings: dict[str, Any], batch_norm: bool) -> None:
    """The protocol has momentum; pFedMe has none."""
    data, method = plain.data(), pFedMe(train=SGD, **settings)
    expected = Plain(data, method, batch_norm)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model(batch_norm=batch_norm))
    net = toy.network(batch_norm)
    plain.assert_close(plain.named(server.weights, net), expected.weights)
    for i, personal in enumerate(expected.personal):
        plain.assert_close(plain.named(clients.states[i].weights, net), personal)


def test_one_step_by_hand() -> None:
    """Softmax regression from zero, one batch of one sample, one inner step: all of it on paper."""
    data, model = plain.line(clients=1, samples=1)
    x, y = data.train.x[0], int(data.train.y[0])
    method = pFedMe(train=LocalTraining(local_epochs=1, batch_size=1, lr=0.1), pull=2.0, steps=1, personal_lr=0.3)
    server, clients = plain.federation(method, data, model, rounds=[([0], Turn(0))])
    slope = torch.full((2,), 0.5, dtype=torch.float64)  # p - onehot at p = (1/2, 1/2)
    slope[y] -= 1
    theta = -0.3 * slope[:, None] * x
    torch.testing.assert_close(clients.states[0].weights.head["weight"], theta)
    torch.testing.assert_close(server.weights.head["weight"], 0.1 * 2.0 * theta)  # w - ηλ (w - θ), w = 0


def test_the_personal_model_is_drawn_to_the_local_copy_not_to_itself() -> None:
    """Anchored at itself the pull would have no gradient (a known error elsewhere)."""
    far = []
    for pull in (0.0, 10.0):
        method = pFedMe(train=SGD.but(weight_decay=0.0), pull=pull, steps=20)
        server, clients = plain.federation(method, plain.data(), toy.model(), rounds=[([1], Turn(0))])
        there, here = tree.flatten(toy.model().start), tree.flatten(clients.states[1].weights)
        far.append(sum(float((there[n] - here[n]).square().sum()) for n in here))
        if pull == 0:  # and the local copy is not drawn anywhere
            toy.assert_same(tree.flatten(server.weights), there)
    assert far[1] < 0.5 * far[0]


@pytest.mark.long
def test_the_personal_model_is_kept_and_starts_from_the_shared_one() -> None:
    """Between rounds only for predictions: a client that was given another personal model trains the same."""
    model, data, method = toy.model(), plain.data(), pFedMe(train=SGD)
    answers = []
    for odd in (False, True):
        server, clients = plain.federation(method, data, model)
        if odd:
            clients.states[1] = tree.apply(lambda t: t + 1, clients.states[1])
        ids = torch.tensor([1])
        answers.append(tree.flatten(clients.train(ids, send(method, server, ids), Turn(3)).ups))
    toy.assert_same(*answers)
    x = data.test.client(1)[0]
    down = method.server_send(server, torch.tensor(1))
    found = method.client_predict(model, clients.states[1], down, x)
    assert torch.equal(found, model(clients.states[1].weights, x))
    assert not torch.allclose(found, model(server.weights, x))


def test_steps_of_padding_do_not_move_the_local_copy() -> None:
    """Side by side with a client of 31 samples, one of 8 has three batches of nothing in every epoch."""
    data, method = plain.data(), pFedMe(train=SGD)
    together = Stacked(method, toy.model(), data, plain.SEED)
    server = method.server_init(together.model, together.census)
    together.join({})
    everyone = torch.arange(5)
    ups = together.train(everyone, send(method, server, everyone), Turn(0)).ups
    expected = Plain(data, method).client(4, Turn(0))
    plain.assert_close(plain.named(tree.pick(ups.weights, 4), toy.network()), expected)
