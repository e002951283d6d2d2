"""FedPAC-Proto against a second implementation with loops over clients and classes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.methods.fedpac_proto import FedPACProto, Up
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
READINGS = [{"proto_to_head": p, "class_weight": w} for p in ("other->own", "own->other") for w in ("prior", "uniform")]


class Plain:
    def __init__(self, data: FederatedData, method: FedPACProto) -> None:
        self.data, self.method = data, method
        net: Any = toy.network().double()
        self.encoder = plain.copy(net[:-1])
        self.heads = [plain.copy(net[-1]) for _ in data.train.sizes]
        self.prototypes: dict[int, Tensor] = {}
        self.weights: list[list[float]] = []

    def round(self, joined: list[int], turn: Turn) -> None:
        ups = {i: self.client(i, turn) for i in joined}
        self.encoder = plain.mean([up["encoder"] for up in ups.values()], [self.data.train.sizes[i] for i in joined])
        for k in range(toy.CLASSES):
            owners = [up for up in ups.values() if k in up["prototypes"]]
            if owners:
                total = sum(up["counts"][k] for up in owners)
                self.prototypes[k] = sum(up["counts"][k] / total * up["prototypes"][k] for up in owners)  # type: ignore[assignment]
        self.weights = []
        for i in joined:
            fit = [self.loss(ups[i], ups[j]) for j in joined]
            self.weights.append([math.exp(-f) / sum(math.exp(-g) for g in fit) for f in fit])
        for i, row in zip(joined, self.weights, strict=True):
            self.heads[i] = plain.mean([ups[j]["head"] for j in joined], row)

    def loss(self, own: dict[str, Any], other: dict[str, Any]) -> float:
        """f_ij, one class after the other."""
        head, asked = (own, other) if self.method.proto_to_head == "other->own" else (other, own)
        top = nn.Linear(8, toy.CLASSES).double()
        top.load_state_dict(head["head"])
        total = 0.0
        for k, prototype in asked["prototypes"].items():
            share = asked["counts"][k] / sum(asked["counts"].values())
            if self.method.class_weight == "uniform":
                share = 1 / len(asked["counts"])
            total += share * float(F.cross_entropy(top(prototype)[None], torch.tensor([k])).detach())
        return total

    def client(self, i: int, turn: Turn) -> dict[str, Any]:
        net: Any = toy.network().double()
        encoder, head = net[:-1], net[-1]
        encoder.load_state_dict(self.encoder)
        head.load_state_dict(self.heads[i])
        x, y = self.data.train.client(i)
        x = (x.double() / 255 - 0.5) / 0.5
        present = [k for k in range(toy.CLASSES) if (y == k).any()]
        means = {k: encoder(x).detach()[y == k].mean(0) for k in present}
        sgd = SGD.but(local_epochs=self.method.head_epochs, lr=self.method.head_lr)
        optimiser = plain.optimiser(head.parameters(), sgd, turn)
        for inputs, labels in plain.batches(self.data, i, turn, sgd):
            optimiser.zero_grad()
            F.cross_entropy(head(encoder(inputs).detach()), labels).backward()
            optimiser.step()
        optimiser = plain.optimiser(encoder.parameters(), SGD, turn)
        for inputs, labels in plain.batches(self.data, i, turn, SGD):
            z = encoder(inputs)
            loss = F.cross_entropy(head(z), labels)
            if self.prototypes:
                target = torch.stack([self.prototypes.get(k, means[k]) for k in labels.tolist()])
                loss = loss + self.method.align * F.mse_loss(z, target)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return {
            "encoder": plain.copy(encoder),
            "head": plain.copy(head),
            "prototypes": {k: encoder(x).detach()[y == k].mean(0) for k in present},
            "counts": {k: float((y == k).sum()) for k in present},
        }


@pytest.mark.parametrize("reading", READINGS, ids=lambda r: "-".join(r.values()))
def test_three_rounds_equal_the_plain_implementation(reading: dict[str, Any]) -> None:
    data, method = plain.data(), FedPACProto(train=SGD, **reading)
    expected = Plain(data, method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, _ = plain.federation(method, data, toy.model())
    plain.assert_close(server.encoder, expected.encoder)
    for k, prototype in expected.prototypes.items():
        torch.testing.assert_close(server.prototypes[k], prototype, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(server.head_weights, torch.tensor(expected.weights, dtype=torch.float64))
    for i, head in enumerate(expected.heads):
        plain.assert_close(tree.pick(server.heads, i), head)


def ups(weight: Tensor, bias: Tensor, prototypes: Tensor, counts: Tensor) -> Up:
    return Up({"w": bias}, {"weight": weight, "bias": bias}, prototypes, counts)


def two_clients() -> Up:
    """One feature, two classes. Head 0 gives class 1 odds of e^(2z), head 1 knows nothing. Client 1 lacks class 0."""
    weight = torch.tensor([[[0.0], [2.0]], [[0.0], [0.0]]], dtype=torch.float64)
    prototypes = torch.tensor([[[-1.0], [3.0]], [[0.0], [1.0]]], dtype=torch.float64)
    counts = torch.tensor([[3.0, 1.0], [0.0, 5.0]], dtype=torch.float64)
    return ups(weight, torch.zeros(2, 2, dtype=torch.float64), prototypes, counts)


def softmax(a: float, b: float) -> list[float]:
    return [math.exp(-a) / (math.exp(-a) + math.exp(-b)), math.exp(-b) / (math.exp(-a) + math.exp(-b))]


def test_two_clients_by_hand() -> None:
    def wrong(z: float) -> float:
        return math.log(1 + math.exp(z))  # cross entropy of the class that a logit z speaks against

    own = 0.75 * wrong(-2) + 0.25 * wrong(-6)  # prototypes of 0 under head 0
    other = wrong(-2)  # prototype of client 1 under head 0
    blank = math.log(2)  # anything under head 1
    by_prior = FedPACProto().head_weights(two_clients())
    expected = torch.tensor([softmax(own, other), softmax(blank, blank)], dtype=torch.float64)
    torch.testing.assert_close(by_prior, expected)
    even = FedPACProto(class_weight="uniform").head_weights(two_clients())
    torch.testing.assert_close(even[0].tolist(), softmax((wrong(-2) + wrong(-6)) / 2, other))
    turned = FedPACProto(proto_to_head="own->other").head_weights(two_clients())
    expected = torch.tensor([softmax(own, blank), softmax(other, blank)], dtype=torch.float64)
    torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize("reading", READINGS, ids=lambda r: "-".join(r.values()))
def test_rows_sum_to_one_and_equals_get_equal_shares(reading: dict[str, str]) -> None:
    method = FedPACProto(**reading)
    torch.manual_seed(0)
    draw = ups(
        *(torch.randn(5, 4, 3, dtype=torch.float64) * 9, torch.randn(5, 4, dtype=torch.float64)),
        torch.randn(5, 4, 3, dtype=torch.float64),
        torch.randint(1, 9, (5, 4)).double(),
    )
    weights = method.head_weights(draw)
    torch.testing.assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64))
    assert (weights >= 0).all()
    assert weights.std() > 0.01
    alike = tree.apply(lambda t: t[:1].expand_as(t), draw)
    torch.testing.assert_close(method.head_weights(alike), torch.full((5, 5), 0.2, dtype=torch.float64))


def test_absent_classes_say_nothing() -> None:
    """A row of zeros is no prototype: whatever the head says about it does not count."""
    given = two_clients()
    bias = torch.tensor([[-50.0, 0.0], [0.0, 0.0]], dtype=torch.float64)  # head 0 is sure that class 0 does not exist
    weights = FedPACProto().head_weights(given._replace(head={**given.head, "bias": bias}))
    assert weights[0, 1] > 0.999


def test_each_client_gets_its_own_combination() -> None:
    method, model = FedPACProto(), toy.model()
    server = method.server_init(model, Looped(method, model, toy.toy(), 0, processes=1).census)
    ids = torch.tensor([1, 2, 4])
    heads = tree.apply(lambda t: torch.stack([t * i for i in (1.0, 20.0, 3.0)]), model.start.head)
    torch.manual_seed(0)
    prototypes = torch.randn(3, toy.CLASSES, model.dim, dtype=torch.float64)
    counts = torch.randint(1, 9, (3, toy.CLASSES)).double()
    encoders = tree.apply(lambda t: torch.stack([t] * 3), model.start.encoder)
    given = Up(encoders, heads, prototypes, counts)
    after = method.server_receive(server, ids, given)
    for row, client in enumerate(ids):
        sent = method.server_send(after, client).head["weight"]
        expected = sum(after.head_weights[row, j] * heads["weight"][j] for j in range(3))
        torch.testing.assert_close(sent, expected)
    for i in (0, 3):
        toy.assert_same(tree.pick(after.heads, i), model.start.head)


def test_a_deep_head_is_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 4)))
    model = make_model(network, toy.SHAPE, toy.CLASSES)
    clients = Looped(FedPACProto(), model, toy.toy(), 0, processes=1)
    with pytest.raises(CoterieError, match="one linear layer"):
        FedPACProto().server_init(model, clients.census)
