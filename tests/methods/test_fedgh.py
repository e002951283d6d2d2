"""FedGH against modules and dictionaries of classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedgh import FedGH, Server, Up
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
KEY = random.server_key(0, 0)


class Plain:
    """Every client has a module; class means are in dictionaries, so what is not there cannot be used."""

    def __init__(self, epochs: int, batch: int, lr: float) -> None:
        self.data, self.epochs, self.batch, self.lr = plain.data(), epochs, batch, lr
        self.nets: list[Any] = [toy.network().double() for _ in self.data.train.sizes]
        self.head: Any = toy.network().double()[-1]  # type: ignore[index]

    def round(self, joined: list[int], turn: Turn) -> None:
        sent = []
        for i in joined:
            net = self.nets[i]
            net[-1].load_state_dict(self.head.state_dict())
            net.load_state_dict(plain.locally(plain.copy(net), self.data, i, turn, SGD))
            sent.append(plain.class_means(net, self.data, i))
        optimizer = torch.optim.SGD(self.head.parameters(), lr=self.lr)
        for z, y in plain.server_batches(sent, turn, self.epochs, self.batch):
            optimizer.zero_grad()
            F.cross_entropy(self.head(z), y).backward()
            optimizer.step()


@pytest.mark.parametrize(("epochs", "batch", "lr"), [(1, 1, 0.01), (2, 5, 0.3)])
def test_three_rounds_equal_the_plain_implementation(epochs: int, batch: int, lr: float) -> None:
    """Client 0 lacks classes; clients that do not take part keep their encoders."""
    expected = Plain(epochs, batch, lr)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    method = FedGH(train=SGD, server_epochs=epochs, server_batch=batch, server_lr=lr)
    server, clients = plain.federation(method, expected.data, toy.model())
    plain.assert_close(server.head, plain.copy(expected.head))
    for i, net in enumerate(expected.nets):
        state = clients.states[i]
        plain.assert_close(plain.named(plain.Weights(state.encoder, state.head), net), plain.copy(net))


def trained(means: list[list[list[float]]], counts: list[list[float]], **settings: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a head that begins with zeros, after the server has trained it."""
    method = FedGH(**settings)
    model = toy.model()
    head = {"weight": torch.zeros(4, 8).double(), "bias": torch.zeros(4).double()}
    rows = F.pad(torch.tensor(means).double(), (0, 8 - len(means[0][0])))
    server = method.server_train(model, Server(head, rows, torch.tensor(counts).double()), KEY)
    return server.head["weight"], server.head["bias"]


def test_two_clients_by_hand() -> None:
    """One step on two means of classes 0 and 1; p = 1/4 everywhere, so the gradient of the bias is p - 1/2 there."""
    means = [[[2.0], [9.0], [9.0], [9.0]], [[9.0], [4.0], [9.0], [9.0]]]
    counts = [[3.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]  # all other means do not exist
    weight, bias = trained(means, counts, server_batch=8, server_lr=1.0)
    assert bias.tolist() == pytest.approx([0.25, 0.25, -0.25, -0.25])
    mean = (2.0 + 4.0) / 2 / 4  # p Σ z / 2
    assert weight[:, 0].tolist() == pytest.approx([2.0 / 2 - mean, 4.0 / 2 - mean, -mean, -mean])
    assert not weight[:, 1:].any()


def test_without_server_training_the_head_stays() -> None:
    """Clients then train as from one fixed head: the head that they all began with."""
    server, _ = plain.federation(FedGH(train=SGD, server_epochs=0), plain.data(), toy.model())
    plain.assert_close(server.head, toy.model().start.head)


def test_the_servers_head_is_no_clients_head() -> None:
    """It is trained from its own last value, on class means only: heads that clients train do not reach it."""
    method, data, model = FedGH(train=SGD), plain.data(), toy.model()
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])
    sent = [plain.class_means(net_of(clients.states[i]), data, i) for i in (0, 1, 3)]
    head: Any = nn.Linear(8, 4).double()
    head.load_state_dict(model.start.head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for z, y in plain.server_batches(sent, Turn(0), 1, 1):
        optimizer.zero_grad()
        F.cross_entropy(head(z), y).backward()
        optimizer.step()
    plain.assert_close(server.head, plain.copy(head))
    assert all(toy.distance(server.head, clients.states[i].head) > 1e-3 for i in range(2))


def net_of(state: Any) -> Any:
    net = toy.network().double()
    net.load_state_dict(plain.named(plain.Weights(state.encoder, state.head), net))
    return net


def test_which_head_predicts() -> None:
    data, model = plain.data(), toy.model()
    server, clients = plain.federation(FedGH(train=SGD), data, model, plain.ROUNDS[:1])
    state, (x, _) = clients.states[0], data.test.client(0)
    down = FedGH().server_send(server, torch.tensor(0))
    z = model.features(state.encoder, x)
    for own, head in ((False, server.head), (True, state.head)):
        found = FedGH(own_head=own).client_predict(model, state, down, x)
        torch.testing.assert_close(found, z @ head["weight"].T + head["bias"])


def test_the_server_keeps_only_the_last_participants() -> None:
    method = FedGH(train=SGD)
    server, _ = plain.federation(method, plain.data(), toy.model())
    ups = Up(torch.ones(2, 4, 8).double(), torch.ones(2, 4).double())
    assert method.server_receive(server, torch.tensor([1, 2]), ups).prototypes.shape == (2, 4, 8)
