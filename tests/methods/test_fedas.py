"""FedAS against plain loops: alignment with the previous encoder, and weights by Fisher information."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedas import FedAS, Up
from coterie.methods.fedper import FedPer
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def prepared(x: Tensor) -> Tensor:
    return (x.double() / 255 - 0.5) / 0.5


class Plain:
    def __init__(self, data: FederatedData, method: FedAS) -> None:
        self.data, self.method = data, method
        self.shared = plain.copy(toy.network().double())  # its head is never used
        self.own: dict[int, dict[str, Tensor]] = {}
        self.information: dict[int, float] = {}

    def round(self, joined: list[int], turn: Turn) -> None:
        for i in joined:
            self.own[i] = self.client(i, turn)
        self.shared = plain.mean([self.own[i] for i in joined], [self.information[i] for i in joined])

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        net = toy.network().double()
        net.load_state_dict(self.shared)
        if i in self.own:
            self.align(i, net, turn)
        before = self.own.get(i, plain.copy(toy.network().double()))
        net.load_state_dict({n: t for n, t in before.items() if n.startswith("6.")}, strict=False)  # the head
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        trace = 0.0
        for x, y in plain.batches(self.data, i, turn, SGD.but(local_epochs=1)):
            slopes = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
            trace += sum(float(g.square().sum()) for g in slopes)
        self.information[i] = trace
        return plain.copy(net)

    def align(self, i: int, net: nn.Module, turn: Turn) -> None:
        past = toy.network().double()
        past.load_state_dict(self.own[i])
        x, y = self.data.train.client(i)
        with torch.no_grad():
            z = past[:-1](prepared(x))  # type: ignore[index]
        means = {c: z[y == c].mean(0) for c in y.unique().tolist()}
        optimiser = torch.optim.SGD(net[:-1].parameters(), lr=self.method.align_lr * turn.rate)  # type: ignore[index]
        sgd = SGD.but(local_epochs=self.method.align_epochs, batch_size=self.method.align_batch)
        for x, y in plain.batches(self.data, i, turn, sgd):
            optimiser.zero_grad()
            z = net[:-1](x)  # type: ignore[index]
            loss = sum(F.mse_loss(z[y == c], means[c].expand(int((y == c).sum()), -1)) for c in y.unique().tolist())
            loss.backward()  # type: ignore[union-attr]
            optimiser.step()


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 2])
def test_three_rounds_equal_the_plain_implementation(epochs: int) -> None:
    data, method = plain.data(), FedAS(train=SGD, align_epochs=epochs, align_lr=0.1, align_batch=6)
    expected = Plain(data, method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model())
    shared = {n: t for n, t in expected.shared.items() if n in server.encoder}
    plain.assert_close(server.encoder, shared)
    for i, own in expected.own.items():
        plain.assert_close(plain.named(clients.states[i].weights, toy.network()), own)


def test_with_equal_information_and_no_alignment_it_is_fedper() -> None:
    """FedPer, too, trains encoder and head together and averages encoders, here of clients of equal size."""
    data = toy.toy(train=(12, 12, 12), test=(3, 3, 3), augmented=False)
    alone = [([i], Turn(t)) for t, i in enumerate((0, 1, 0, 2))]  # one participant: its weight is 1
    found, _ = plain.federation(FedAS(train=SGD, align_epochs=0), data, toy.model(), alone)
    expected, _ = plain.federation(FedPer(train=SGD), data, toy.model(), alone)
    toy.assert_same(found.encoder, expected.shared.encoder)


def test_the_first_training_is_not_aligned() -> None:
    once = plain.ROUNDS[:1]
    found, _ = plain.federation(FedAS(train=SGD, align_lr=1.0), plain.data(), toy.model(), once)
    without, _ = plain.federation(FedAS(train=SGD, align_epochs=0), plain.data(), toy.model(), once)
    toy.assert_same(found.encoder, without.encoder)


def test_alignment_brings_features_to_the_previous_class_means() -> None:
    data, model, method = plain.data(), toy.model(), FedAS(train=SGD, align_epochs=20, align_lr=0.2)
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:2])
    x, y = data.train.client(1)
    own = Data(x, y, torch.tensor(3), torch.ones((), dtype=torch.float64), toy.CLASSES, data.transform, alone=True)
    z = model.features(clients.states[1].weights.encoder, x)
    means = torch.stack([z[y == c].mean(0) if (y == c).any() else z[0] for c in range(toy.CLASSES)])

    def apart(encoder: tree.Tree) -> float:
        return float((model.features(encoder, x) - means[y]).square().mean())

    down = method.server_send(server, torch.tensor(1))
    assert apart(method.aligned(model, clients.states[1], down, own)) < 0.5 * apart(down.encoder)


def test_weights_are_the_information_by_hand() -> None:
    """Two clients with encoders of 1 and 5, and information 1 and 3: the mean is 4. Without any, they count equally."""
    method = FedAS()
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    encoders = {n: torch.stack([torch.full_like(t, v) for v in (1.0, 5.0)]) for n, t in server.encoder.items()}
    for information, expected in (([1.0, 3.0], 4.0), ([0.0, 0.0], 3.0), ([2.0, 0.0], 1.0)):
        ups = Up(encoders, torch.tensor(information, dtype=torch.float64))
        after = method.server_receive(server, torch.tensor([0, 1]), ups)
        assert all(t.unique().tolist() == [expected] for t in after.encoder.values())


def test_a_client_that_has_not_trained_uses_the_received_encoder() -> None:
    method, model, data = FedAS(train=SGD), toy.model(), plain.data()
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])
    down, x = method.server_send(server, torch.tensor(2)), data.test.x[:3]
    expected = model.logits(model.start.head, model.features(server.encoder, x))
    assert torch.equal(method.client_predict(model, clients.states[2], down, x), expected)
    assert torch.equal(method.client_predict(model, clients.states[1], down, x), model(clients.states[1].weights, x))


def test_it_runs_to_the_end_and_is_measured_after_training() -> None:
    _, history = toy.looped(toy.method("fedas"), toy.model(), toy.toy(), rounds=2)
    assert [number for number, _ in history.curve("post")] == [1, 2]
