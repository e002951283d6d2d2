"""FedCAC against plain loops over parameters and clients, and against masks and overlaps computed by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedcac import FedCAC, overlaps
from coterie.methods.local import Local
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


class Plain:
    """Critical parameters are sets of (tensor, position)."""

    def __init__(self, data: FederatedData, share: float, rounds: int) -> None:
        self.data, self.share, self.rounds, self.t = data, share, rounds, 0
        self.shared = plain.copy(toy.network().double())
        self.customized: dict[int, dict[str, Tensor]] = {}
        self.critical: dict[int, set[tuple[str, int]]] = {}

    def personal(self, i: int) -> dict[str, Tensor]:
        mixed = {n: t.clone() for n, t in self.shared.items()}
        for name, place in self.critical.get(i, set()):
            mixed[name].view(-1)[place] = self.customized[i][name].reshape(-1)[place]
        return mixed

    def round(self, joined: list[int], turn: Turn) -> None:
        self.t += 1
        trained = {i: self.client(i, turn) for i in joined}
        self.shared = plain.mean(list(trained.values()), [self.data.train.sizes[i] for i in joined])
        overlap = {}
        for i in joined:
            for j in joined:
                a, b = self.critical[i], self.critical[j]
                overlap[i, j] = 1 - len(a ^ b) / (len(a) + len(b))
        others = [v for (i, j), v in overlap.items() if i != j]
        average = sum(others) / len(others)
        threshold = average + self.t / self.rounds * (max(others) - average)
        for i in joined:
            together = [j for j in joined if j == i or overlap[i, j] >= threshold]
            self.customized[i] = plain.mean([trained[j] for j in together], [1] * len(together))

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        before, net = self.personal(i), toy.network().double()
        net.load_state_dict(before)
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        after = plain.copy(net)
        chosen = set()
        for name, t in after.items():
            moved = (t - before[name]) * t
            order = sorted(((abs(v), k) for k, v in enumerate(moved.view(-1).tolist())), reverse=True)
            chosen |= {(name, k) for value, k in order[: int(self.share * len(order))] if value > 0}
        self.critical[i] = chosen
        return after


@pytest.mark.parametrize(("share", "rounds"), [(0.5, 100), (0.3, 2)])
def test_three_rounds_equal_the_plain_implementation(share: float, rounds: int) -> None:
    """Also after the last round of collaboration, and for clients that skip rounds."""
    data = plain.data()
    expected = Plain(data, share, rounds)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    method = FedCAC(train=SGD, critical=share, collaboration=rounds)
    server, _ = plain.federation(method, data, toy.model())
    plain.assert_close(plain.named(server.weights, toy.network()), expected.shared)
    for i in range(5):
        sent = method.server_send(server, torch.tensor(i)).weights
        plain.assert_close(plain.named(sent, toy.network()), expected.personal(i))


def test_without_critical_parameters_it_is_fedavg() -> None:
    method = FedCAC(train=SGD, critical=0.0)
    found, _ = plain.federation(method, plain.data(), toy.model())
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model())
    toy.assert_same(tree.flatten(found.weights), tree.flatten(averaged.weights))
    for i in range(5):
        toy.assert_same(tree.flatten(method.server_send(found, torch.tensor(i)).weights), tree.flatten(found.weights))


def test_all_critical_without_collaborators_is_local() -> None:
    """A single participant has no one to share with. Weight decay moves every parameter, so all are critical."""
    method, alone = FedCAC(train=SGD, critical=1.0), [([i], Turn(t)) for t, i in enumerate((0, 1, 0))]
    server, _ = plain.federation(method, plain.data(), toy.model(), alone)
    _, clients = plain.federation(Local(train=SGD), plain.data(), toy.model(), alone)
    sent = method.server_send(server, torch.tensor(0)).weights
    toy.assert_same(tree.flatten(sent), tree.flatten(clients.states[0].weights))


def toy_start() -> tree.Tree:
    return tree.flatten(toy.model().start)


def test_two_clients_by_hand() -> None:
    """Overlaps: {0, 1} and {1, 2} share one of two; a third client shares nothing with either."""
    masks = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]).bool()
    found = overlaps({"a": masks[:, :2], "b": masks[:, 2:]})
    expected = torch.tensor([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]], dtype=torch.float64)
    assert torch.equal(found, expected)
    method = FedCAC(collaboration=4)  # O_avg = 1/6, O_max = 1/2: thresholds 1/4, ..., 1/2, and 7/12 in round 5
    for t, together in ((1, True), (4, True), (5, False)):
        pairs = method.collaborators(found, torch.tensor(t))
        assert pairs.tolist() == [[1, float(together), 0], [float(together), 1, 0], [0, 0, 1]]


def test_the_top_of_a_tensor() -> None:
    change = torch.tensor([[0.0, -3.0], [2.0, 0.0]])
    assert FedCAC(critical=0.5).top(change).tolist() == [[False, True], [True, False]]
    assert FedCAC(critical=0.25).top(change).tolist() == [[False, True], [False, False]]
    assert FedCAC(critical=1.0).top(change).tolist() == [[False, True], [True, False]]  # what did not move is not
    assert not FedCAC(critical=0.2).top(change).any()


def test_critical_parameters_keep_the_first_rounds_training() -> None:
    """They do not return to the initial weights."""
    method = FedCAC(train=SGD)
    server, _ = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:1])
    start, sent = toy_start(), tree.flatten(method.server_send(server, torch.tensor(1)).weights)
    masks = tree.pick(server.critical, 1)
    assert all(bool((sent[name] != start[name])[mask].all()) for name, mask in masks.items())
    assert sum(int(mask.sum()) for mask in masks.values()) > 300


def test_clients_that_have_not_trained_receive_the_global_model() -> None:
    method = FedCAC(train=SGD)
    server, _ = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:1])
    for down in (method.server_send(server, torch.tensor(2)), method.server_greet(server)):
        toy.assert_same(tree.flatten(down.weights), tree.flatten(server.weights))


def test_the_overlap_is_reported() -> None:
    method = FedCAC(train=SGD)
    server, _ = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:1])  # 0, 1 and 3
    overlap = method.server_report(server)["overlap"]
    assert torch.equal(overlap, overlap.T)
    assert overlap.diagonal().tolist() == [1, 1, 0, 1, 0]
    assert not overlap[2].any()
