"""FedFomo against a loop with modules, its choice of models, and what the held-out samples may touch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import random, tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import Census
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Stacked, Turn
from coterie.execution.requests import keys, send
from coterie.methods.fedfomo import Down, FedFomo, Server
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-2)


def parts(data: FederatedData, client: int) -> tuple[list[int], list[int]]:
    """Which samples are held out, and the others. Drawn when the client joins."""
    n = data.train.sizes[client]
    key = keys(plain.SEED, Turn(-1), torch.tensor(client))
    shuffled = random.shuffle(random.derive(key, random.SPLIT), n).tolist()
    size = max(n // 5, 1)
    return shuffled[:size], sorted(shuffled[size:])


class Plain:
    """Every client judges the models of all others that uploaded in the last round."""

    def __init__(self, data: FederatedData) -> None:
        self.data, m = data, data.num_clients
        self.models = [plain.copy(toy.network().double()) for _ in range(m)]
        self.affinity = torch.zeros(m, m, dtype=torch.float64)
        self.uploaded: list[int] = []

    def round(self, joined: list[int], turn: Turn) -> None:
        sent = {j: self.models[j] for j in self.uploaded}
        trained = {i: self.client(i, {j: w for j, w in sent.items() if j != i}, turn) for i in joined}
        for i, model in trained.items():
            self.models[i] = model
        self.uploaded = joined

    def client(self, i: int, sent: dict[int, dict[str, Tensor]], turn: Turn) -> dict[str, Tensor]:
        x, y = self.data.train.client(i)
        x = (x.double() / 255 - 0.5) / 0.5
        held_out, others = parts(self.data, i)
        own = self.models[i]

        def judged(model: dict[str, Tensor]) -> float:
            net = toy.network().double()
            net.load_state_dict(model)
            return float(F.cross_entropy(net(x[held_out]), y[held_out]).detach())

        useful: dict[int, float] = {}
        for j, model in sent.items():
            way = sum(float((model[n] - own[n]).square().sum()) for n in own) ** 0.5
            value = (judged(own) - judged(model)) / (way + 1e-5)
            self.affinity[i, j] += value
            useful[j] = max(value, 0.0)
        if total := sum(useful.values()):
            own = {n: t + sum(q / total * (sent[j][n] - t) for j, q in useful.items()) for n, t in own.items()}
        net = toy.network().double()
        net.load_state_dict(own)
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        key = keys(plain.SEED, turn, torch.tensor(i))
        for epoch in range(SGD.local_epochs):
            shuffled = random.shuffle(random.derive(key, random.SHUFFLE, epoch), len(y)).tolist()
            for index in torch.split(torch.tensor([s for s in shuffled if s in others]), SGD.batch_size):
                optimiser.zero_grad()
                F.cross_entropy(net(x[index]), y[index]).backward()
                optimiser.step()
        return plain.copy(net)


ROUNDS = (*plain.ROUNDS, ([0, 1, 2, 3, 4], Turn(3)), ([0, 1, 2, 3, 4], Turn(4)))


def test_five_rounds_equal_the_plain_implementation() -> None:
    """Five models can be sent, so nobody is left to chance."""
    data, method = plain.data(), FedFomo(train=SGD)
    expected = Plain(data)
    for joined, turn in ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model(), ROUNDS)
    off_diagonal = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(server.affinity[off_diagonal], expected.affinity[off_diagonal], rtol=1e-7, atol=1e-9)
    assert (expected.affinity > 0).any()  # some models helped,
    assert (expected.affinity < 0).any()  # some did not
    for i, model in enumerate(expected.models):
        plain.assert_close(plain.named(clients.states[i].weights, toy.network()), model)
        plain.assert_close(plain.named(tree.pick(server.models, i), toy.network()), model)


def test_the_first_round_is_local_training_on_what_is_not_held_out() -> None:
    data, model = plain.data(), toy.model()
    _, clients = plain.federation(FedFomo(train=SGD), data, model, ROUNDS[:1])
    for i in ROUNDS[0][0]:
        expected = Plain(data).client(i, {}, Turn(0))
        plain.assert_close(plain.named(clients.states[i].weights, toy.network()), expected)


def server(affinity: list[list[float]], uploaded: list[bool]) -> Server:
    model, m = toy.model(), len(affinity)
    start = FedFomo().server_init(model, Census(torch.ones(m), torch.ones(m, toy.CLASSES)))
    return start._replace(
        affinity=torch.tensor(affinity, dtype=torch.float64),
        uploaded=torch.tensor(uploaded, dtype=torch.bool),
        round=torch.tensor(1),
    )


def test_the_best_are_sent_never_the_own_and_never_one_that_is_not_there() -> None:
    values = [[9.0, 5.0, 7.0, 6.0, 8.0], [-1.0, 9.0, -2.0, -3.0, 9.0]]
    known = server(values + [[0.0] * 5] * 3, [True, True, True, True, False])
    greedy = FedFomo(models=2, explore=0.0)
    assert greedy.chosen(known, torch.tensor(0)).tolist() == [2, 3]
    assert greedy.chosen(known, torch.tensor(1)).tolist() == [0, 2]
    few = server(values + [[0.0] * 5] * 3, [True, True, False, False, False])
    assert greedy.chosen(few, torch.tensor(0)).tolist() == [1, 0]  # only one other: the own model fills the place
    nobody = server(values + [[0.0] * 5] * 3, [False] * 5)
    assert greedy.chosen(nobody, torch.tensor(3)).tolist() == [3, 3]


def counted(method: FedFomo, affinity: list[float], rounds: range) -> Tensor:
    """(m,) how often each is sent to client 0."""
    m = len(affinity)
    known = server([affinity] * m, [True] * m)
    chosen = torch.func.vmap(lambda number: method.chosen(known._replace(round=number), torch.tensor(0)))
    picks = chosen(torch.tensor(rounds))  # (R, M)
    sent = F.one_hot(picks, m).sum(1)  # (R, m)
    assert (sent <= 1).all()
    assert not sent[:, 0].any()
    return sent.sum(0)


def test_exploration() -> None:
    affinity = [0.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    greedy = counted(FedFomo(models=2, explore=0.0), affinity, range(50))
    assert greedy.tolist() == [0, 50, 50, 0, 0, 0, 0]
    random = counted(FedFomo(models=2, explore=1.0, explore_decay=0.0), affinity, range(600))
    assert ((random[1:] > 150) & (random[1:] < 250)).all()  # 200 each; standard deviation below 12
    some = counted(FedFomo(models=1, explore=0.3, explore_decay=0.0), affinity, range(600))
    assert 420 < some[1] < 480  # 600 (0.7 + 0.3 / 6) = 450, standard deviation 11
    later = counted(FedFomo(models=2), affinity, range(6, 56))  # 0.3 - 0.05 * 6 = 0
    assert later.tolist() == [0, 50, 50, 0, 0, 0, 0]
    assert counted(FedFomo(models=2), affinity, range(1, 6))[3:].any()  # before, there was some


def test_ties_are_broken_at_random() -> None:
    """In the second round nothing is known of anybody: not all clients must get the models of the first few."""
    tied = counted(FedFomo(models=2, explore=0.0), [0.0, 0.0, 0.0, 0.0, -1.0], range(300))
    assert ((tied[1:4] > 160) & (tied[1:4] < 240)).all()  # 200 each
    assert tied[4] == 0


def test_clients_draw_independently() -> None:
    method, known = FedFomo(models=1, explore=0.0), server([[0.0] * 9] * 9, [True] * 9)
    together = torch.func.vmap(lambda client: method.chosen(known, client))(torch.arange(9))
    assert together.tolist() == [method.chosen(known, torch.tensor(i)).tolist() for i in range(9)]
    assert len({int(i) for i in together}) > 3


def test_a_model_is_taken_as_far_as_it_helps() -> None:
    """Two others, equally far away on opposite sides: one has a lower loss, the other a higher one."""
    model, data = toy.model(), plain.data()
    method = FedFomo(train=SGD.but(local_epochs=0), models=2)
    clients = Looped(method, model, data, plain.SEED, processes=1)
    clients.join({})
    bias = model.start.head["bias"]
    _, y = data.train.client(1)
    right = bias + 3 * F.one_hot(y[parts(data, 1)[0]].mode().values, toy.CLASSES)
    heads = [model.start.head | {"bias": b} for b in (right, 2 * bias - right)]
    downs = tree.stack([tree.stack([model.start._replace(head=head) for head in heads])])
    answers = clients.train(torch.tensor([1]), Down(downs), Turn(0))
    assert answers.ups.values[0, 0] > 0
    assert answers.ups.values[0, 1] < 0
    torch.testing.assert_close(answers.ups.weights.head["bias"][0], right)  # all of the one, nothing of the other
    again = clients.train(torch.tensor([1]), Down(tree.stack([tree.stack([model.start] * 2)])), Turn(1))
    torch.testing.assert_close(again.ups.weights.head["bias"][0], right)  # both others are worse: it stays
    assert (again.ups.values < 0).all()


def changed(data: FederatedData, client: int, samples: list[int]) -> FederatedData:
    """The same data, but these samples of a client are black."""
    x = data.train.x.clone()
    x[[data.train.starts[client] + s for s in samples]] = 0
    return dataclasses.replace(data, train=dataclasses.replace(data.train, x=x))


@pytest.mark.parametrize("kind", [Looped, Stacked])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_held_out_samples_are_not_trained_on_in_any_round(kind: Any, batch_norm: bool) -> None:
    """Nor do they reach BatchNorm. They are the same in all rounds, or one would be trained on sooner or later."""
    data, method = plain.data(), FedFomo(train=SGD)

    def trained(data: FederatedData) -> tree.Tree:
        clients = kind(method, toy.model(batch_norm=batch_norm), data, plain.SEED)
        clients.join({})
        only = torch.tensor([0])
        for number in range(4):  # alone, so nothing is mixed
            start = method.server_init(clients.model, clients.census)
            mine = start._replace(models=tree.put(start.models, 0, clients.states[0].weights))
            clients.train(only, send(method, mine, only), Turn(number))
        return tree.flatten(clients.states[0])

    held_out, others = parts(data, 0)
    assert (len(held_out), len(others)) == (2, 11)  # so the last batch is not full
    toy.assert_same(trained(data), trained(changed(data, 0, held_out)))
    assert toy.distance(trained(data), trained(changed(data, 0, others[:1]))) > 1e-6


def test_batch_norm_leaves_padding_out() -> None:
    """These sizes leave equal remainders by 8, but four fifths of them do not."""
    method, model = FedFomo(train=SGD), toy.model(batch_norm=True)
    data = toy.toy(train=(13, 21, 29, 13, 5), augmented=False)
    expected, _ = toy.looped(method, model, data)
    found, _ = toy.stacked(method, model, data)
    assert toy.distance(expected, found) < 1e-10


def test_a_newcomer_gets_the_models_that_others_value() -> None:
    known = server([[0.0, 1.0, 3.0]] * 3, [True, True, False])
    bias = torch.arange(3.0).expand(toy.CLASSES, 3).T  # model i has bias i
    numbered = known._replace(models=known.models._replace(head=known.models.head | {"bias": bias}))
    assert FedFomo(models=2).server_greet(numbered).models.head["bias"][:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("settings", [{"models": 0}, {"held_out": 0.0}, {"held_out": 1.0}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CoterieError):
        FedFomo(**settings)
