"""CFL: FedAvg until a split, the best bipartition among all, and splits that a loop written from the paper makes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.cfl import CFL, bipartition, compared
from coterie.methods.fedavg import FedAvg
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
EAGER = {"settled": 10.0, "apart": 0.0}  # split whenever there is a place


def best(cosines: Tensor, members: list[int]) -> tuple[set[int], float]:
    """All bipartitions, tried: the one with the smallest largest cosine across."""
    found: tuple[set[int], float] = (set(), 2.0)
    for size in range(1, len(members)):
        for side in itertools.combinations(members, size):
            rest = [j for j in members if j not in side]
            across = max(float(cosines[i, j]) for i in side for j in rest)
            if across < found[1] and members[0] in side:
                found = (set(side), across)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_bipartition_is_the_best_of_all(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    _, cosines = compared({"w": torch.randn(7, 3, generator=draw, dtype=torch.float64)})
    members = [1, 2, 4, 5, 6]
    member = torch.zeros(7).bool().index_fill(0, torch.tensor(members), True)
    side, across = bipartition(cosines, member)
    expected, value = best(cosines, members)
    assert float(across) == pytest.approx(value, abs=1e-14)
    assert {i for i in members if bool(side[i])} == expected


class Plain:
    """One model and one list of clients for each cluster."""

    def __init__(self, data: FederatedData, method: CFL) -> None:
        self.data, self.method = data, method
        self.models = [plain.copy(toy.network().double())]
        self.members = [list(range(data.num_clients))]
        self.updates: dict[int, Tensor] = {}
        self.known: set[int] = set()

    def round(self, joined: list[int], turn: Turn) -> None:
        for model, members in zip(self.models, self.members, strict=True):
            here = [i for i in joined if i in members]
            trained = {i: self.client(i, model, turn) for i in here}
            for i, own in trained.items():
                self.updates[i] = torch.cat([(own[n] - model[n]).flatten() for n in model])
                self.known.add(i)
            if here:
                model.update(plain.mean(list(trained.values()), [self.data.train.sizes[i] for i in here]))
        for number in range(len(self.models)):
            self.split(number)

    def client(self, i: int, weights: dict[str, Tensor], turn: Turn) -> dict[str, Tensor]:
        net = toy.network().double()
        net.load_state_dict(weights)
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        return plain.copy(net)

    def split(self, number: int) -> None:
        members, method = self.members[number], self.method
        if len(self.models) == method.clusters or len(members) < 2 or not set(members) <= self.known:
            return
        sizes = [self.data.train.sizes[i] for i in members]
        mean = sum(n / sum(sizes) * self.updates[i] for n, i in zip(sizes, members, strict=True))
        longest = max(float(self.updates[i].norm()) for i in members)
        if not (float(mean.norm()) < method.settled and longest > method.apart):  # type: ignore[union-attr]
            return
        units = {i: self.updates[i] / self.updates[i].norm() for i in members}
        cosines = torch.zeros(self.data.num_clients, self.data.num_clients, dtype=torch.float64)
        for i in members:
            for j in members:
                cosines[i, j] = units[i] @ units[j]
        side, across = best(cosines, members)
        if method.error >= ((1 - across) / 2) ** 0.5:
            return
        self.members[number], rest = [i for i in members if i in side], [i for i in members if i not in side]
        self.members.append(rest)
        self.models.append(dict(self.models[number]))
        self.known -= set(members)


EVERYONE = [([0, 1, 2, 3, 4], Turn(t)) for t in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("rounds", [EVERYONE, [*plain.ROUNDS, ([1, 4], Turn(3))]], ids=["all", "some"])
@pytest.mark.parametrize("settings", [{"clusters": 8}, {"clusters": 2}, {"error": 0.7}])
def test_rounds_equal_the_plain_implementation(
    rounds: list[tuple[list[int], Turn]], settings: dict[str, float]
) -> None:
    data, method = plain.data(), CFL(train=SGD, **(EAGER | settings))  # type: ignore[arg-type]
    expected = Plain(data, method)
    for joined, turn in rounds:
        expected.round(joined, turn)
    server, _ = plain.federation(method, data, toy.model(), rounds)
    assert int(server.made) == len(expected.models)
    for number, (model, members) in enumerate(zip(expected.models, expected.members, strict=True)):
        plain.assert_close(plain.named(tree.pick(server.models, number), toy.network()), model)
        assert [i for i in range(5) if int(server.cluster[i]) == number] == members


def test_the_cases_above_split() -> None:
    server, _ = plain.federation(CFL(train=SGD, **EAGER), plain.data(), toy.model(), EVERYONE)
    assert int(server.made) > 2


@pytest.mark.parametrize(
    "settings", [{}, {"clusters": 1, "settled": 10.0, "apart": 0.0}, {"error": 1.0, "settled": 10.0}]
)
def test_before_a_split_it_is_fedavg(settings: dict[str, float]) -> None:
    method = CFL(train=SGD, **settings)  # type: ignore[arg-type]
    found, _ = plain.federation(method, plain.data(), toy.model())
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model())
    assert int(found.made) == 1
    sent = method.server_send(found, torch.tensor(3)).weights
    assert toy.distance(tree.flatten(sent), tree.flatten(averaged.weights)) < 1e-14


def test_two_groups_by_hand() -> None:
    """Updates along +x and -x: the mean is short, each is long, and the cosine across is -1."""
    lengths, cosines = compared({"w": torch.tensor([[2.0, 0.0], [2.0, 0.1], [-2.0, 0.0], [-2.0, 0.1]])})
    assert lengths.tolist() == pytest.approx([2, 4.01**0.5, 2, 4.01**0.5])
    side, across = bipartition(cosines, torch.ones(4).bool())
    assert side.tolist() == [True, True, False, False]
    assert float(across) == pytest.approx((-4 + 0.01) / 4.01)  # between the second and the fourth


def test_a_cluster_waits_for_all_its_clients() -> None:
    method = CFL(train=SGD, **EAGER)
    server, _ = plain.federation(method, plain.data(), toy.model(), [([0, 1, 2, 3], Turn(0))])
    assert int(server.made) == 1
    server, _ = plain.federation(method, plain.data(), toy.model(), [([0, 1, 2, 3], Turn(0)), ([4], Turn(1))])
    assert int(server.made) == 2
    assert not server.known.any()


def test_a_newcomer_receives_the_model_of_the_largest_cluster() -> None:
    method = CFL(train=SGD, **EAGER)
    server, _ = plain.federation(method, plain.data(), toy.model(), EVERYONE)
    server = server._replace(cluster=torch.tensor([1, 1, 0, 1, 2]))
    greeted = tree.flatten(method.server_greet(server).weights)
    toy.assert_same(greeted, tree.flatten(tree.pick(server.models, 1)))
    assert torch.equal(method.server_report(server)["cluster"], server.cluster)


def test_splits_stacked_equal_looped() -> None:
    method = toy.method("cfl", **EAGER)
    expected, _ = toy.looped(method, toy.model(), toy.toy(), join_ratio=1.0)
    found, _ = toy.stacked(method, toy.model(), toy.toy(), join_ratio=1.0)
    assert int(expected["server.made"]) > 1
    assert toy.distance(expected, found) < 1e-10
