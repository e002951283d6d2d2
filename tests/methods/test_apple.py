"""APPLE against a loop written from its equations: one mixture, one slope, two step sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.methods.apple import APPLE
from coterie.methods.local import Local
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


class Plain:
    def __init__(self, data: FederatedData, method: APPLE) -> None:
        self.data, self.method, self.r = data, method, 0
        sizes = data.train.sizes
        self.cores = [plain.copy(toy.network().double()) for _ in sizes]
        self.shares = torch.tensor([n / sum(sizes) for n in sizes], dtype=torch.float64)
        self.relations = [self.shares.clone() for _ in sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        """Every client mixes the core models from before the round, and sends its own, not the mixture."""
        trained = {i: self.client(i, turn) for i in joined}
        for i, core in trained.items():
            self.cores[i] = core
        self.r += 1

    def mixture(self, i: int, core: dict[str, Tensor]) -> dict[str, Tensor]:
        cores = [core if j == i else other for j, other in enumerate(self.cores)]
        return {n: sum(p * c[n] for p, c in zip(self.relations[i], cores, strict=True)) for n in core}  # type: ignore[misc]

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        method, core = self.method, self.cores[i]
        speed = {n: torch.zeros_like(t) for n, t in core.items()}
        on = self.r < method.pull_rounds
        pull = method.pull * 0.001 ** (self.r / method.pull_rounds) if on else 0.0
        for x, y in plain.batches(self.data, i, turn, SGD):
            net = toy.network().double()
            net.load_state_dict(self.mixture(i, core))
            F.cross_entropy(net(x), y).backward()
            slope = {n: p.grad for n, p in net.named_parameters()}
            cores = [core if j == i else other for j, other in enumerate(self.cores)]
            by_relation = torch.stack([sum((slope[n] * c[n]).sum() for n in c) for c in cores])  # type: ignore[misc,operator,arg-type]
            by_relation = by_relation + pull * (self.relations[i] - self.shares)
            own = self.relations[i][i]
            moved = {}
            for n, t in core.items():
                speed[n] = 0.5 * speed[n] + own * slope[n] + 1e-3 * t  # type: ignore[operator]
                moved[n] = t - SGD.lr * turn.rate * speed[n]
            core = moved
            self.relations[i] = self.relations[i] - method.relation_lr * turn.rate * by_relation
        return core


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"relation_lr": 0.1, "pull": 3.0, "pull_rounds": 2}, {"relation_lr": 0.0}])
def test_three_rounds_equal_the_plain_implementation(settings: dict[str, float]) -> None:
    data, method = plain.data(), APPLE(train=SGD, **settings)  # type: ignore[arg-type]
    expected = Plain(data, method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model())
    for i in range(5):
        plain.assert_close(plain.named(tree.pick(server.cores, i), toy.network()), expected.cores[i])
        torch.testing.assert_close(clients.states[i].own.relations, expected.relations[i], rtol=1e-10, atol=1e-12)
    net, x = toy.network().double(), data.test.x[:4]
    net.load_state_dict(expected.mixture(3, expected.cores[3]))
    found = method.client_predict(toy.model(), clients.states[3], method.server_send(server, torch.tensor(3)), x)
    torch.testing.assert_close(found, net((x.double() / 255 - 0.5) / 0.5), rtol=1e-9, atol=1e-11)


def test_a_single_client_is_local() -> None:
    """Its only relation is 1 and stays so."""
    data = toy.toy(train=(20,), test=(5,))
    rounds = [([0], Turn(t)) for t in range(2)]
    found, _ = plain.federation(APPLE(train=SGD, relation_lr=0.0), data, toy.model(), rounds)
    _, clients = plain.federation(Local(train=SGD), data, toy.model(), rounds)
    own = tree.flatten(clients.states[0].weights)
    assert toy.distance(tree.flatten(tree.pick(found.cores, 0)), own) < 1e-14


def test_two_clients_by_hand() -> None:
    """Softmax regression, one step from zero weights but a core of ones at the other client."""
    data, model = plain.line(clients=2)
    method = APPLE(train=LocalTraining(local_epochs=1, batch_size=12, lr=0.5), relation_lr=0.2, pull=0.0)
    clients = Looped(method, model, data, plain.SEED, processes=1)
    server = method.server_init(clients.model, clients.census)
    ones = tree.apply(torch.ones_like, model.start)
    server = server._replace(cores=tree.put(server.cores, 1, ones))
    clients.join(method.server_welcome(server))
    ids = torch.tensor([0])
    downs = tree.apply(lambda t: t[None], method.server_send(server, ids[0]))
    clients.train(ids, downs, Turn(0))
    own = clients.states[0].own
    x, y = data.train.client(0)
    mixed = 0.5 * torch.ones(2, 3, dtype=torch.float64)  # p = (1/2, 1/2): half of the other's core model
    wrong = ((x @ mixed.T + 0.5).softmax(1) - F.one_hot(y, 2)) / 12
    slope, bias = wrong.T @ x, wrong.sum(0)
    torch.testing.assert_close(own.core.head["weight"], -0.5 * 0.5 * slope, rtol=1e-10, atol=1e-14)
    expected = torch.tensor([0.5, 0.5 - 0.2 * float(slope.sum() + bias.sum())], dtype=torch.float64)
    torch.testing.assert_close(own.relations, expected, rtol=1e-10, atol=1e-14)


def test_the_default_learns_relations() -> None:
    _, clients = plain.federation(APPLE(train=SGD), plain.data(), toy.model())
    state = clients.states[0]
    assert not torch.equal(state.own.relations, state.shares)


def test_the_pull_fades() -> None:
    method = APPLE(pull=2.0, pull_rounds=4)
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    found = [float(method.strength(server._replace(round=torch.tensor(r)))) for r in (0, 2, 3, 4, 9)]
    assert found == pytest.approx([2.0, 2 * 0.001**0.5, 2 * 0.001**0.75, 0.0, 0.0])


def test_a_newcomer_learns_relations_to_the_others_only() -> None:
    method, model, data = APPLE(train=SGD, relation_lr=0.1), toy.model(), plain.data()
    server, clients = plain.federation(method, data, model)
    down = method.server_greet(server)
    state = clients.states[4]._replace(own=clients.states[4].own._replace(core=model.start))
    x = data.test.x[:4]
    mixed = tree.mix(server.cores, state.own.relations)
    torch.testing.assert_close(method.client_predict(model, state, down, x), model(mixed, x), rtol=1e-12, atol=1e-14)
