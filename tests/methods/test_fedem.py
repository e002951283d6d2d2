"""FedEM against modules with lists of samples: responsibilities by number of the sample, probabilities mixed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import Census
from coterie.core.model import Weights
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.execution.requests import keys, send
from coterie.methods.fedem import Down, FedEM, Mixture, State
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def module(weights: Weights) -> nn.Module:
    net = toy.network().double()
    net.load_state_dict(plain.named(weights, net))
    return net


def scaled(x: Tensor) -> Tensor:
    return (x.double() / 255 - 0.5) / 0.5


class Plain:
    """Algorithm 1 of the paper, with participants only in the averages."""

    def __init__(self, components: Weights, data: FederatedData) -> None:
        self.count, self.data = len(components.head["bias"]), data
        self.components = [module(tree.pick(components, j)) for j in range(self.count)]
        self.shares = [[1 / self.count] * self.count for _ in data.train.sizes]

    def expect(self, i: int) -> list[list[float]]:
        """q of every sample; the mixture weights of the client change."""
        x, y = self.data.train.client(i)
        q: list[list[float]] = []
        with torch.no_grad():
            told = [F.log_softmax(net(scaled(x)), 1) for net in self.components]
        for sample, label in enumerate(y.tolist()):
            likely = [self.shares[i][j] * math.exp(told[j][sample, label]) for j in range(self.count)]
            q.append([value / sum(likely) for value in likely])
        self.shares[i] = [sum(row[j] for row in q) / len(q) for j in range(self.count)]
        return q

    def maximise(self, i: int, q: list[list[float]], turn: Turn, epochs: int) -> list[dict[str, Tensor]]:
        x, y = self.data.train.client(i)
        trained = []
        for j, component in enumerate(self.components):
            net = toy.network().double()
            net.load_state_dict(component.state_dict())
            optimiser = plain.optimiser(net.parameters(), SGD, turn)
            for epoch in range(epochs):
                key = random.derive(keys(plain.SEED, turn, torch.tensor(i)), random.SHUFFLE, epoch)
                for index in torch.split(random.shuffle(key, len(y)), SGD.batch_size):
                    optimiser.zero_grad()
                    own = torch.tensor([q[sample][j] for sample in index.tolist()], dtype=torch.float64)
                    loss = F.cross_entropy(net(scaled(x[index])), y[index], reduction="none")
                    ((own * loss).sum() / len(index)).backward()
                    optimiser.step()
            trained.append(plain.copy(net))
        return trained

    def round(self, joined: list[int], turn: Turn) -> None:
        ups = [self.maximise(i, self.expect(i), turn, SGD.local_epochs) for i in joined]
        samples = [self.data.train.sizes[i] for i in joined]
        for j, component in enumerate(self.components):
            component.load_state_dict(plain.mean([up[j] for up in ups], samples))


def run(method: FedEM) -> tuple[Plain, Any, Any]:
    data = plain.data()
    start, _ = plain.federation(method, data, toy.model(), rounds=())
    expected = Plain(start.components, data)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    return expected, *plain.federation(method, data, toy.model())


@pytest.mark.parametrize("count", [2, 3])
def test_three_rounds_equal_the_plain_implementation(count: int) -> None:
    expected, server, clients = run(FedEM(train=SGD, components=count))
    for j, component in enumerate(expected.components):
        plain.assert_close(plain.named(tree.pick(server.components, j), toy.network()), plain.copy(component))
    for i, shares in enumerate(expected.shares):
        torch.testing.assert_close(clients.states[i].shares, torch.tensor(shares, dtype=torch.float64))
    assert max(max(shares) for shares in expected.shares) > 1 / count + 0.01  # the mixtures are not all alike


def test_probabilities_are_mixed_not_logits() -> None:
    expected, server, clients = run(FedEM(train=SGD))
    method, model = clients.method, clients.model
    for i in range(5):
        x, _ = clients.data.test.client(i)
        found = method.client_predict(model, clients.states[i], method.server_send(server, torch.tensor(i)), x)
        with torch.no_grad():
            told = [F.softmax(net(scaled(x)), 1) for net in expected.components]
        mixed = sum(share * p for share, p in zip(expected.shares[i], told, strict=True))
        torch.testing.assert_close(found.softmax(1), mixed)
        torch.testing.assert_close(found.exp(), mixed)  # log-probabilities, so that their cross entropy is right


@pytest.mark.long
@pytest.mark.parametrize(("epochs", "alike"), [(None, False), (0, False), (3, False), (3, True)])
def test_fine_tuning_equals_the_plain_implementation(epochs: int | None, alike: bool) -> None:
    """A fresh E-step with the final components, whose responsibilities then stay; without epochs that is all."""
    expected, server, clients = run(FedEM(train=SGD, finetune_epochs=epochs, finetune_all=alike))
    everyone, turn = torch.arange(5), Turn(3)
    clients.finish(everyone, send(clients.method, server, everyone), turn)
    for i in range(5):
        q = expected.expect(i)
        q = [[1.0] * 3 for _ in q] if alike else q
        tuned = expected.maximise(i, q, turn, SGD.local_epochs if epochs is None else epochs)
        found = clients.states[i].tuned
        for j in range(3):
            plain.assert_close(plain.named(tree.pick(found.components, j), toy.network()), tuned[j])
        torch.testing.assert_close(found.shares, torch.tensor(expected.shares[i], dtype=torch.float64))


def test_one_component_is_fedavg() -> None:
    found, _ = toy.looped(toy.method("fedem", components=1), toy.model(), toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    for part in ("server.components.", "states.1.tuned.components."):
        other = part.replace(".components", "" if "tuned" in part else ".weights")
        mine = {n.removeprefix(part): t[0] for n, t in found.items() if n.startswith(part)}
        assert (
            toy.distance(mine, {n.removeprefix(other): t for n, t in averaged.items() if n.startswith(other)}) < 1e-12
        )


def test_the_e_step_sees_samples_as_they_are() -> None:
    """Training crops and flips, the E-step does not."""
    data, model, method = toy.toy(), toy.model(), FedEM(train=SGD)
    server, _ = plain.federation(method, data, model, rounds=())
    x, y = data.train.client(3)
    held = Data(x, y, torch.tensor(1), torch.tensor(1.0, dtype=torch.float64), toy.CLASSES, data.transform)
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    q, _ = method.expect(model, Mixture(server.components, even), held)
    assert held.transform.crop
    torch.testing.assert_close(q, torch.tensor(Plain(server.components, data).expect(3), dtype=torch.float64))


def test_a_component_that_left_the_mixture_does_no_harm() -> None:
    """log 0 is guarded, and such a component is not trained by this client."""
    data, model, method = plain.data(), toy.model(), FedEM(train=SGD.but(weight_decay=0.0), components=2)
    server, _ = plain.federation(method, data, model, rounds=())
    x, y = data.train.client(1)
    held = Data(x, y, torch.tensor(1), torch.tensor(1.0, dtype=torch.float64), toy.CLASSES, data.transform)
    state = State(torch.tensor([1.0, 0.0], dtype=torch.float64), {}, ())
    after, up = method.client_train(model, state, Down(server.components), held)
    assert all(t.isfinite().all() for t in tree.leaves((after, up)))
    assert after.shares[1] < 1e-10
    gone = toy.distance(tree.flatten(tree.pick(up.components, 1)), tree.flatten(tree.pick(server.components, 1)))
    assert gone < 1e-10
    assert method.client_predict(model, after, Down(up.components), x).isfinite().all()


def test_no_component_is_refused() -> None:
    with pytest.raises(CoterieError, match="at least 1"):
        FedEM(components=0)


def test_trained_on_all_samples_alike_components_are_several_fedavgs() -> None:
    method, model = toy.method("fedem", train_all=True), toy.model()
    start = method.server_init(model, Census(torch.ones(5), torch.ones(5, toy.CLASSES))).components
    found, _ = toy.looped(method, model, toy.toy())
    for component in range(3):
        begun = replace(model, start=tree.pick(start, component))
        averaged, _ = toy.looped(toy.method("fedavg"), begun, toy.toy())
        mine, theirs = (
            {n.removeprefix(part): t for n, t in of.items() if n.startswith(part)}
            for of, part in ((found, "server.components."), (averaged, "server.weights."))
        )
        assert toy.distance({n: t[component] for n, t in mine.items()}, theirs) < 1e-12
