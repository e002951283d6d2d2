"""FedProto against modules and dictionaries of classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedproto import FedProto, Server, Up
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


class Plain:
    """Every client has a module; prototypes are in dictionaries, so what is not there cannot be used."""

    def __init__(self, data: FederatedData, source: str, align: float) -> None:
        self.data, self.source, self.align = data, source, align
        self.nets: list[Any] = [toy.network().double() for _ in data.train.sizes]
        self.shared: dict[int, Tensor] = {}
        self.own: list[dict[int, Tensor]] = [{} for _ in data.train.sizes]

    def train(self, i: int, turn: Turn) -> None:
        net = self.nets[i]
        known = dict(self.shared if self.source == "global" else self.own[i])
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            z = net[:-1](x)
            target = torch.stack([known.get(k, z[row].detach()) for row, k in enumerate(y.tolist())])
            (F.cross_entropy(net[-1](z), y) + self.align * F.mse_loss(z, target)).backward()
            optimiser.step()
        x, y = self.data.train.client(i)
        with torch.no_grad():
            z = net[:-1]((x.double() / 255 - 0.5) / 0.5)
        self.own[i] = {k: z[y == k].mean(0) for k in y.unique().tolist()}

    def round(self, joined: list[int], turn: Turn) -> None:
        for i in joined:
            self.train(i, turn)
        for k in range(toy.CLASSES):
            owners = [i for i in joined if k in self.own[i]]
            counts = [int((self.data.train.client(i)[1] == k).sum()) for i in owners]
            if owners:
                parts = [n * self.own[i][k] for n, i in zip(counts, owners, strict=True)]
                self.shared[k] = torch.stack(parts).sum(0) / sum(counts)


@pytest.mark.parametrize("source", ["global", "local"])
def test_three_rounds_equal_the_plain_implementation(source: str) -> None:
    """Round 0 has nothing to align to; client 0 lacks classes."""
    data, expected = plain.data(), Plain(plain.data(), source, align=3.0)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(FedProto(train=SGD, prototypes=source, align=3.0), data, toy.model())
    for i, net in enumerate(expected.nets):
        plain.assert_close(plain.named(clients.states[i].weights, net), plain.copy(net))
        for k, prototype in expected.own[i].items():
            torch.testing.assert_close(clients.states[i].prototypes[k], prototype)
    for k, prototype in expected.shared.items():
        found = server.prototypes[k]
        torch.testing.assert_close(found, prototype if source == "global" else torch.zeros_like(found))


@pytest.mark.parametrize("source", ["global", "local"])
def test_without_alignment_it_is_local_training(source: str) -> None:
    found, _ = toy.looped(toy.method("fedproto", prototypes=source, align=0.0), toy.model(), toy.toy())
    alone, _ = toy.looped(toy.method("local"), toy.model(), toy.toy())
    for i in range(5):
        prefix = f"states.{i}.weights."
        toy.assert_same(*({n: t for n, t in run.items() if n.startswith(prefix)} for run in (found, alone)))


def test_alignment_draws_features_to_the_prototypes() -> None:
    found, _ = toy.looped(toy.method("fedproto", align=5.0), toy.model(), toy.toy())
    alone, _ = toy.looped(toy.method("fedproto", align=0.0), toy.model(), toy.toy())
    assert toy.distance(found, alone) > 1e-3


def test_prototypes_are_averaged_by_class_counts_by_hand() -> None:
    """Class 0: one sample at 1 and three at 5. Class 1: nobody has it now, so it stays. Class 2: one client only."""
    means = torch.tensor([[[1.0], [0.0], [0.0]], [[5.0], [0.0], [7.0]]])
    counts = torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 2.0]])
    before = Server(torch.tensor([[9.0], [8.0], [9.0]]))
    after = FedProto().server_receive(before, torch.tensor([0, 1]), Up(means, counts))
    assert after.prototypes.tolist() == [[4.0], [8.0], [7.0]]


def test_local_prototypes_are_not_sent() -> None:
    _, history = toy.looped(toy.method("fedproto", prototypes="local"), toy.model(), toy.toy())
    assert all(r.bytes_up == r.bytes_down == 0 for r in history)


def test_the_classifier_is_tested_not_the_nearest_prototype() -> None:
    """A head that always says class 2 is believed."""
    model, method = toy.model(), FedProto(train=SGD)
    _, clients = plain.federation(method, plain.data(), model)
    state = clients.states[1]
    head = {"weight": torch.zeros_like(state.weights.head["weight"]), "bias": torch.eye(toy.CLASSES).double()[2]}
    state = state._replace(weights=state.weights._replace(head=head))
    x, _ = clients.data.test.client(1)
    down = method.server_send(Server(state.prototypes), torch.tensor(1))
    assert (method.client_predict(model, state, down, x).argmax(1) == 2).all()


def test_local_prototypes_stacked_equal_looped() -> None:
    method = toy.method("fedproto", prototypes="local")
    found, _ = toy.stacked(method, toy.model(), toy.toy())
    expected, _ = toy.looped(method, toy.model(), toy.toy())
    assert toy.distance(found, expected) < 1e-10


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(CoterieError, match="source of prototypes"):
        FedProto(prototypes="server")
