"""PFAKD against a loop with modules: a frozen copy of the encoder received is the teacher."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.losses import attention_distance
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.core.tree import live
from coterie.execution import Turn
from coterie.methods.pfakd import PFAKD
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-2, keep_momentum=True)


def attention(a: Tensor) -> Tensor:
    q = a.pow(2).sum(1).reshape(len(a), -1)
    return q / q.pow(2).sum(1, keepdim=True).sqrt()


class Plain:
    """As the authors run it: every client has its optimisers for life, and its teacher is made anew every round."""

    def __init__(self, data: FederatedData, method: PFAKD, batch_norm: bool) -> None:
        self.data, self.method, self.batch_norm = data, method, batch_norm
        nets: list[Any] = [self.network() for _ in data.train.sizes]
        self.nets, self.encoder = nets, plain.copy(nets[0][:-1])
        parts = [(n[:-1], n[-1]) if method.at == "alternate" else (n,) for n in nets]
        self.optimisers = [[plain.optimiser(p.parameters(), SGD, Turn(0)) for p in own] for own in parts]

    def network(self) -> Any:
        return toy.network(self.batch_norm).double()

    def round(self, joined: list[int], turn: Turn) -> None:
        encoders = [self.client(i, turn) for i in joined]
        sizes = [self.data.train.sizes[i] if self.method.aggregation == "samples" else 1 for i in joined]
        self.encoder = plain.mean(encoders, sizes)

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        net, teacher = self.nets[i], self.network()[:-1]
        for encoder in (net[:-1], teacher):
            encoder.load_state_dict(self.encoder, strict=False)
        teacher.train(self.method.teacher_mode == "train")
        for optimiser in self.optimisers[i]:
            optimiser.param_groups[0]["lr"] = SGD.lr * turn.rate
        if self.method.at == "alternate":
            net.eval()  # the encoder is not trained: used as in testing
            for x, y in plain.batches(self.data, i, turn, SGD.but(local_epochs=self.method.head_epochs)):
                self.step(self.optimisers[i][1], F.cross_entropy(net[-1](net[:-1](x).detach()), y))
            net.train()
        for x, y in plain.batches(self.data, i, turn, SGD):
            z, maps = self.run(net[:-1], x)
            with torch.no_grad():
                target, shown = self.run(teacher, x)
            loss = F.cross_entropy(net[-1](z), y) + self.method.distill * F.mse_loss(z, target)
            if self.method.at == "attention":
                for a, b in zip(maps, shown, strict=True):
                    apart = (attention(a) - attention(b)).pow(2).sum(1).mean()
                    loss = loss + self.method.attention * apart
            self.step(self.optimisers[i][0], loss)
        return plain.copy(net[:-1])

    def run(self, encoder: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Features, and what comes out of the activation behind the one convolution."""
        middle = len(encoder) - 3  # flatten, linear and its activation follow
        z = encoder[:middle](x)
        return encoder[middle:](z), [z]

    def step(self, optimiser: Any, loss: Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"distill": 5.0, "aggregation": "uniform"},
        {"teacher_mode": "eval"},
        {"at": "alternate", "head_epochs": 3},
        {"at": "attention", "attention": 10.0},
    ],
    ids=["usual", "uniform", "eval", "alternate", "attention"],
)
def test_three_rounds_equal_the_plain_implementation(changes: dict[str, Any], batch_norm: bool) -> None:
    data, method = plain.data(), PFAKD(train=SGD, **changes)
    expected = Plain(data, method, batch_norm)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model(batch_norm=batch_norm))
    plain.assert_close(server.encoder, expected.encoder)
    for i, net in enumerate(expected.nets):
        plain.assert_close(clients.states[i].head, plain.copy(net[-1]))


def test_without_distillation_it_is_fedper() -> None:
    found, _ = toy.looped(toy.method("pfakd", distill=0.0, keep_momentum=True), toy.model(batch_norm=True), toy.toy())
    per, _ = toy.looped(toy.method("fedper", keep_momentum=True), toy.model(batch_norm=True), toy.toy())
    named = {n.replace("shared.", "").replace("personal.head", "head"): t for n, t in per.items()}
    toy.assert_same(found, {n: t for n, t in named.items() if not n.startswith("server.head.")} | head_momenta(found))


def head_momenta(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in found.items() if ".head_momentum" in n}


def test_the_first_step_is_that_of_fedper() -> None:
    """The teacher begins as the student's twin, so that there is nothing to learn from it, however strong."""
    data, settings = toy.toy(train=(20,), test=(5,)), {"local_epochs": 1, "batch_size": 20}
    found, _ = toy.looped(toy.method("pfakd", distill=100.0, **settings), toy.model(), data, rounds=1)
    per, _ = toy.looped(toy.method("fedper", **settings), toy.model(), data, rounds=1)
    for name in toy.model().start.encoder:
        theirs = per[f"server.shared.encoder.{name}"]
        torch.testing.assert_close(found[f"server.encoder.{name}"], theirs, rtol=0, atol=1e-14)


def test_the_head_learns_nothing_from_the_teacher() -> None:
    """One step: the distance of features moves the encoder only."""
    data, settings = toy.toy(train=(20,), test=(5,)), {"local_epochs": 2, "batch_size": 20, "momentum": 0.0}
    weak, _ = toy.looped(toy.method("pfakd", distill=0.0, **settings), toy.model(), data, rounds=1)
    strong, _ = toy.looped(toy.method("pfakd", distill=50.0, **settings), toy.model(), data, rounds=1)
    assert toy.distance({"": weak["states.0.head.weight"]}, {"": strong["states.0.head.weight"]}) < 1e-14
    assert not torch.equal(weak["server.encoder.0.weight"], strong["server.encoder.0.weight"])


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("at", ["alternate", "attention"])
def test_variants_stacked_equal_looped(at: str, batch_norm: bool) -> None:
    method = toy.method("pfakd", at=at, keep_momentum=True)
    expected, _ = toy.looped(method, toy.model(batch_norm=batch_norm), toy.toy())
    found, _ = toy.stacked(method, toy.model(batch_norm=batch_norm), toy.toy())
    assert toy.distance(expected, found) < 1e-10


def test_attention_compares_where_not_how_much() -> None:
    """q is normed: a map ten times as bright looks the same; one that looks elsewhere is sqrt(2) away."""
    a = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    b = a.clone()
    a[0, :, 0, 0], b[0, :, 1, 1] = 3.0, 7.0
    assert attention_distance([a], [10 * a]).item() == pytest.approx(0.0)
    assert attention_distance([a, a], [b, a]).item() == pytest.approx(2.0)


def test_maps_are_those_behind_each_block() -> None:
    torch.manual_seed(0)
    relu = nn.ReLU()  # one module in two places, as in the networks of the papers
    first, second = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), relu], [nn.Conv2d(2, 3, 3), relu]
    network = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    model = make_model(network, (1, 12, 12), 4).to("cpu", torch.float64)
    x = torch.rand(5, 1, 12, 12, dtype=torch.float64)
    for training in (True, False, True):
        again = copy.deepcopy(network).double().train(training)
        received = model.start.encoder
        maps, z = model.maps(live(received) if training else received, x)
        assert len(maps) == 2
        torch.testing.assert_close(z, again[:8](x))  # BatchNorm writes after it has normalised
        assert training == (not torch.equal(again[1].running_mean, received["1.running_mean"]))
        again = copy.deepcopy(network).double().train(training)
        torch.testing.assert_close(maps[0], again[:4](x))
        again = copy.deepcopy(network).double().train(training)
        torch.testing.assert_close(maps[1], again[:6](x))


def test_attention_needs_convolutions() -> None:
    model = make_model(nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Linear(2, 2)), (3,), 2)
    with pytest.raises(CoterieError, match="no convolutions"):
        model.maps(model.start.encoder, torch.rand(4, 3))
    with pytest.raises(CoterieError, match="reading of AT"):
        PFAKD(at="alternating")
