"""Fed-RoD against a loop with modules and two optimisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.losses import balanced_cross_entropy
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedrod import Down, FedRoD, State
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-2)


class Plain:
    """The generic loss moves encoder and shared head, the personal loss the personal head, each by its optimiser."""

    def __init__(self, data: FederatedData, sgd: LocalTraining) -> None:
        self.data, self.sgd = data, sgd
        net: Any = toy.network().double()
        self.weights = plain.copy(net)
        self.heads = [plain.copy(net[-1]) for _ in data.train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        models = [self.client(i, turn) for i in joined]
        self.weights = plain.mean(models, [self.data.train.sizes[i] for i in joined])

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        net: Any = toy.network().double()
        net.load_state_dict(self.weights)
        own = nn.Linear(8, toy.CLASSES).double()
        own.load_state_dict(self.heads[i])
        labels = self.data.train.client(i)[1].tolist()
        present = [k for k in range(toy.CLASSES) if k in labels]
        n = torch.tensor([float(labels.count(k)) for k in present], dtype=torch.float64)
        generic = plain.optimiser(net.parameters(), self.sgd, turn)
        personal = plain.optimiser(own.parameters(), self.sgd, turn)
        for x, y in plain.batches(self.data, i, turn, self.sgd):
            z = net[:-1](x)
            u = net[-1](z)
            target = torch.tensor([present.index(k) for k in y.tolist()])
            balanced = n * u[:, present].exp()  # a softmax over the classes that the client has
            loss = -(balanced / balanced.sum(1, keepdim=True))[torch.arange(len(y)), target].log().mean()
            own_loss = F.cross_entropy(u.detach() + own(z.detach()), y)
            generic.zero_grad()
            loss.backward()
            personal.zero_grad()
            own_loss.backward()
            generic.step()
            personal.step()
        self.heads[i] = plain.copy(own)
        return plain.copy(net)


@pytest.mark.parametrize("drop_last", [False, True])
def test_three_rounds_equal_the_plain_implementation(drop_last: bool) -> None:
    """Client 0 lacks classes. Classes are counted over all samples, also those in a batch that is dropped."""
    data, sgd = plain.data(), SGD.but(drop_last=drop_last)
    expected = Plain(data, sgd)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(FedRoD(train=sgd), data, toy.model())
    plain.assert_close(plain.named(server.weights, toy.network()), expected.weights)
    for i, head in enumerate(expected.heads):
        plain.assert_close(clients.states[i].head, head)


def answer(head: tree.Tree | None = None, batch_norm: bool = False, **changes: Any) -> tuple[State, tree.Tree]:
    """What client 0 makes of one round, from this personal head."""
    model, data = toy.model(batch_norm=batch_norm), plain.data()
    method = FedRoD(train=SGD.but(**changes))
    _, clients = plain.federation(method, data, model, rounds=())
    state = clients.states[0]
    clients.states[0] = state if head is None else state._replace(head=head)
    downs = tree.stack([Down(model.start)])
    return clients.states[0], tree.flatten(clients.train(torch.tensor([0]), downs, Turn(0)).ups)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_personal_loss_does_not_reach_what_is_shared(batch_norm: bool) -> None:
    """Whatever the personal head is, encoder and shared head come out the same to the last bit."""
    other = {n: 10 * torch.ones_like(t) for n, t in toy.model().start.head.items()}
    toy.assert_same(answer(batch_norm=batch_norm)[1], answer(other, batch_norm=batch_norm)[1])


def test_the_shared_head_is_told_nothing_of_absent_classes() -> None:
    """Plain cross entropy would push them down. Client 0 has classes 0 and 1."""
    _, up = answer(weight_decay=0.0)
    start = toy.model().start.head
    for name in ("weight", "bias"):
        assert torch.equal(up[f"weights.head.{name}"][0, 2:], start[name][2:])
        assert not torch.equal(up[f"weights.head.{name}"][0, :2], start[name][:2])


def test_balanced_cross_entropy_is_finite_where_classes_are_absent() -> None:
    u = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([6.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    losses = balanced_cross_entropy(u, torch.tensor([0, 2, 0]), counts)
    p = 6 * u[0, 0].exp() / (6 * u[0, 0].exp() + 2 * u[0, 2].exp())
    torch.testing.assert_close(losses[0], -p.log())
    (slope,) = torch.autograd.grad(losses.sum(), u)
    assert slope.isfinite().all()
    assert not slope[:, [1, 3]].any()
    strange = balanced_cross_entropy(u, torch.tensor([1, 1, 1]), counts)  # a class that was never counted
    assert strange.isfinite().all()


def test_personal_predictions_add_both_heads() -> None:
    model, data = toy.model(), plain.data()
    server, clients = plain.federation(FedRoD(train=SGD), data, model)
    net: Any = toy.network().double()
    net.load_state_dict(plain.named(server.weights, net))
    x = data.test.x[:6]
    z = net[:-1]((x.double() / 255 - 0.5) / 0.5)
    own = clients.states[1].head
    method = FedRoD()
    found = method.client_predict(model, clients.states[1], method.server_send(server, torch.tensor(1)), x)
    torch.testing.assert_close(found, net[-1](z) + z @ own["weight"].T + own["bias"])
    torch.testing.assert_close(method.server_predict(model, server, x), net[-1](z))


def test_without_balance_what_is_shared_is_fedavg() -> None:
    model, data = toy.model(), toy.toy()
    found, _ = toy.looped(toy.method("fedrod", balance=0.0), model, data)
    averaged, _ = toy.looped(toy.method("fedavg"), model, data)
    for name, value in averaged.items():
        if name.startswith("server."):
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
