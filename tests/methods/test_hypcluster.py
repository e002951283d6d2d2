"""HypCluster against modules that choose, train and average by loops, and by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.model import Weights
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import send
from coterie.federation import Settings, federate
from coterie.methods.hypcluster import HypCluster, Server, Up
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def two_groups() -> FederatedData:
    """Clients 1 and 3 have other names for the classes."""
    data = plain.data()
    parts = {}
    for name in ("train", "test"):
        split = getattr(data, name)
        odd = (split.owners() == 1) | (split.owners() == 3)
        parts[name] = dataclasses.replace(split, y=torch.where(odd, (split.y + 2) % toy.CLASSES, split.y))
    return dataclasses.replace(data, **parts)


def module(weights: Weights) -> nn.Module:
    net = toy.network().double()
    net.load_state_dict(plain.named(weights, net))
    return net.eval()


def scaled(x: Tensor) -> Tensor:
    return (x.double() / 255 - 0.5) / 0.5


def losses(models: list[nn.Module], data: FederatedData, client: int, split: str = "train") -> list[float]:
    x, y = getattr(data, split).client(client)
    with torch.no_grad():
        return [float(F.cross_entropy(net(scaled(x)), y)) for net in models]


def test_rounds_equal_the_plain_implementation() -> None:
    data, method = two_groups(), HypCluster(train=SGD, clusters=3)
    start, _ = plain.federation(method, data, toy.model(), rounds=())
    models = [module(tree.pick(start.models, j)) for j in range(3)]
    chosen: list[dict[int, int]] = []
    rounds = [*plain.ROUNDS, ([0, 1, 2, 3, 4], Turn(3)), ([0, 1, 2, 3, 4], Turn(4))]
    for joined, turn in rounds:
        trained: dict[int, dict[str, Tensor]] = {}
        chosen.append({})
        for i in joined:
            of_models = losses(models, data, i)
            chosen[-1][i] = of_models.index(min(of_models))
            net = toy.network().double()
            net.load_state_dict(models[chosen[-1][i]].state_dict())
            optimiser = plain.optimiser(net.parameters(), SGD, turn)
            for x, y in plain.batches(data, i, turn, SGD):
                optimiser.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimiser.step()
            trained[i] = plain.copy(net)
        for j in range(3):
            members = [i for i in joined if chosen[-1][i] == j]
            if members:
                mean = plain.mean([trained[i] for i in members], [data.train.sizes[i] for i in members])
                models[j].load_state_dict(mean)
    server, clients = plain.federation(method, data, toy.model(), rounds)
    assert len(set(chosen[-1].values())) > 1  # or this would be FedAvg
    assert any(len(set(c.values())) < 3 for c in chosen)  # and some cluster was empty
    for j in range(3):
        net = toy.network()
        plain.assert_close(plain.named(tree.pick(server.models, j), net), plain.copy(models[j]))
    assert [int(clients.states[i].cluster) for i in range(5)] == [chosen[-1][i] for i in range(5)]


def test_one_cluster_is_fedavg() -> None:
    found, _ = toy.looped(toy.method("hypcluster", clusters=1), toy.model(), toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    mine = {n.replace("models", "weights"): t[0] for n, t in found.items() if n.startswith("server.")}
    assert toy.distance(mine, {n: t for n, t in averaged.items() if n.startswith("server.")}) < 1e-14


def test_models_begin_differently() -> None:
    """Equal ones would be one cluster for ever (a known trap)."""
    server, _ = plain.federation(HypCluster(train=SGD), two_groups(), toy.model(), rounds=())
    head = server.models.head["weight"]
    assert len(head) == 5
    assert all(not torch.equal(head[i], head[j]) for i in range(5) for j in range(i))


def test_means_by_cluster_by_hand() -> None:
    """Clients 4 and 0 chose model 2, client 1 model 0; nobody chose model 1."""

    def model(*values: float) -> Weights:
        rows = torch.tensor(values, dtype=torch.float64)
        return Weights({"w": rows[:, None].repeat(1, 2)}, {"b": 10 * rows})

    ups = Up(torch.tensor([2, 0, 2], dtype=torch.int32), model(1.0, 2.0, 5.0), torch.tensor([1.0, 7.0, 3.0]))
    server = HypCluster(clusters=3).server_receive(Server(model(-1.0, -2.0, -3.0)), torch.tensor([0, 1, 4]), ups)
    expected = model(2.0, -2.0, (1 * 1 + 3 * 5) / 4)
    assert toy.distance(tree.flatten(server.models), tree.flatten(expected)) < 1e-15


def kept(data: FederatedData, client: int) -> Data:
    x, y = data.train.client(client)
    return Data(x, y, torch.tensor(1), torch.tensor(1.0, dtype=torch.float64), toy.CLASSES, data.transform)


def test_the_last_choice_is_among_the_final_models() -> None:
    """A client whose models changed places follows its own; the choice is by training samples, not by test samples."""
    data, model, method = two_groups(), toy.model(), HypCluster(train=SGD, clusters=3)
    server, clients = plain.federation(method, data, model)
    turned = Server(tree.pick(server.models, torch.tensor([1, 2, 0])))
    for i in range(5):
        state, down = clients.states[i], method.server_send(turned, torch.tensor(i))
        found = method.client_finish(model, state, down, kept(data, i)).cluster
        of_models = losses([module(tree.pick(turned.models, j)) for j in range(3)], data, i)
        assert int(found) == of_models.index(min(of_models))


def test_a_newcomer_chooses_when_it_joins() -> None:
    data, model, method = two_groups(), toy.model(), HypCluster(train=SGD, clusters=3)
    server, clients = plain.federation(method, data, model)
    models = [module(tree.pick(server.models, j)) for j in range(3)]
    clients.join(method.server_welcome(server))
    found = [int(clients.states[i].cluster) for i in range(5)]
    assert found == [(of_models := losses(models, data, i)).index(min(of_models)) for i in range(5)]
    assert len(set(found)) > 1


def test_what_is_reported_is_the_chosen_model() -> None:
    data, model = two_groups(), toy.model()
    clients = Looped(HypCluster(train=SGD, clusters=3), model, data, 5, processes=1)
    server, history = federate(clients, Settings(rounds=2, seed=5, join_ratio=0.4))
    models = [module(tree.pick(server.models, j)) for j in range(3)]
    for i in range(5):  # those who never trained too
        of_models = losses(models, data, i)
        x, y = data.test.client(i)
        right = (models[of_models.index(min(of_models))](scaled(x)).argmax(1) == y).sum()
        assert history[-1].scores["finished", "test"].weighted[i] == right


def test_after_training_the_trained_model_is_tested() -> None:
    data, model, method = two_groups(), toy.model(), HypCluster(train=SGD, clusters=2)
    server, clients = plain.federation(method, data, model, rounds=())
    everyone = torch.arange(5)
    downs = send(method, server, everyone)
    ups: Any = clients.train(everyone, downs, Turn(0)).ups
    post = clients.score(everyone, tree.overlay(downs, ups), "test")
    for i in range(5):
        expected = losses([module(tree.pick(ups.weights, i))], data, i, "test")[0]
        assert float(post.loss[i]) == pytest.approx(expected, rel=1e-12)


def test_no_cluster_is_refused() -> None:
    with pytest.raises(CoterieError, match="at least 1"):
        HypCluster(clusters=0)
