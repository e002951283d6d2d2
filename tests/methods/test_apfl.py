"""APFL against a loop with modules, and its two ends: no own model, nothing but an own model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.execution.requests import send
from coterie.methods.apfl import APFL, Down
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-2)


class Plain:
    """Algorithm 1 in the space of parameters: step on w, then on v through the mixture, then on α."""

    def __init__(self, data: FederatedData, share: float, adaptive: bool, batch_norm: bool) -> None:
        self.data, self.adaptive, self.batch_norm = data, adaptive, batch_norm
        self.weights = plain.copy(toy.network(batch_norm).double())
        self.own = [dict(self.weights) for _ in data.train.sizes]
        self.shares = [share for _ in data.train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        models = [self.client(i, turn) for i in joined]
        self.weights = plain.mean(models, [self.data.train.sizes[i] for i in joined])

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        shared, own, mixture = (toy.network(self.batch_norm).double() for _ in range(3))
        shared.load_state_dict(self.weights, strict=False)
        own.load_state_dict(self.own[i], strict=False)
        shared_optimiser, own_optimiser = (plain.optimiser(net.parameters(), SGD, turn) for net in (shared, own))
        for x, y in plain.batches(self.data, i, turn, SGD):
            shared_optimiser.zero_grad()
            F.cross_entropy(shared(x), y).backward()
            shared_optimiser.step()
            share, v, w = self.shares[i], plain.copy(own), plain.copy(shared)
            mixture.load_state_dict(
                v | {n: share * v[n] + (1 - share) * w[n] for n in v if "running" not in n}, strict=False
            )
            mixture.zero_grad()
            F.cross_entropy(mixture(x), y).backward()
            own.load_state_dict({n: t for n, t in mixture.state_dict().items() if "running" in n}, strict=False)
            slope: dict[str, Tensor] = {n: p.grad for n, p in mixture.named_parameters()}  # type: ignore[misc]
            for n, p in own.named_parameters():
                p.grad = share * slope[n]
            own_optimiser.step()
            if self.adaptive:
                step = SGD.lr * turn.rate * sum(float(((v[n] - w[n]) * slope[n]).sum()) for n in slope)
                self.shares[i] = min(max(share - step, 0.0), 1.0)
        self.own[i] = plain.copy(own)
        return plain.copy(shared)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(("share", "adaptive"), [(0.25, False), (0.75, False), (0.25, True), (0.001, True)])
def test_three_rounds_equal_the_plain_implementation(share: float, adaptive: bool, batch_norm: bool) -> None:
    data = plain.data()
    expected = Plain(data, share, adaptive, batch_norm)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    method = APFL(train=SGD, share=share, adaptive=adaptive)
    server, clients = plain.federation(method, data, toy.model(batch_norm=batch_norm))
    net = toy.network(batch_norm)
    plain.assert_close(plain.named(server.weights, net), expected.weights)
    for i, own in enumerate(expected.own):
        plain.assert_close(plain.named(clients.states[i].weights, net), own)
        assert float(clients.states[i].share) == pytest.approx(expected.shares[i], abs=1e-11)
    assert adaptive == any(s != share for s in expected.shares)


def test_a_learned_share_stays_between_nothing_and_all() -> None:
    """With a learning rate that throws it out of its bounds."""
    method = APFL(train=SGD.but(lr=2.0, momentum=0.0, local_epochs=1), share=0.5, adaptive=True)
    _, clients = plain.federation(method, plain.data(), toy.model())
    shares = [float(clients.states[i].share) for i in range(5)]
    assert all(0 <= share <= 1 for share in shares)
    assert {0.0, 1.0} & set(shares)  # somebody reached a bound


def test_a_learned_share_is_the_same_side_by_side() -> None:
    """A step of padding does not move it."""
    method, model, data = toy.method("apfl", adaptive=True), toy.model(), toy.toy()
    expected, _ = toy.looped(method, model, data)
    assert toy.distance(expected, toy.stacked(method, model, data)[0]) < 1e-10


def part(found: tree.Tree, prefix: str) -> tree.Tree:
    return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_an_own_model_alone_is_local(batch_norm: bool) -> None:
    model, data = toy.model(batch_norm=batch_norm), toy.toy()
    found, _ = toy.looped(toy.method("apfl", share=1.0), model, data)
    local, _ = toy.looped(toy.method("local"), model, data)
    for i in range(5):
        assert toy.distance(part(found, f"states.{i}.weights."), part(local, f"states.{i}.weights.")) < 1e-12


def test_without_an_own_model_the_personal_is_the_global() -> None:
    _, history = toy.looped(toy.method("apfl", share=0.0), toy.model(), toy.toy())
    _, averaged = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    for mine, theirs in zip(history, averaged, strict=False):
        for point in (("pre", "test"), ("post", "test"), ("global", "test")):
            assert toy.rows(mine.scores[point]) == toy.rows(theirs.scores[point])


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_is_shared_is_fedavg(adaptive: bool) -> None:
    """The own model takes nothing from it and adds nothing to it, gradients of one do not reach the other."""
    model = toy.model(batch_norm=True)
    found, _ = toy.looped(toy.method("apfl", adaptive=adaptive), model, toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), model, toy.toy())
    toy.assert_same(part(found, "server."), part(averaged, "server."))


def test_the_personal_model_mixes_with_the_shared_one_as_just_trained() -> None:
    """POST: what the client sent back stands for what it was sent. The own model is not overwritten by the mixture."""
    data, model, method = plain.data(), toy.model(), APFL(train=SGD, share=0.25)
    server, clients = plain.federation(method, data, model)
    ids = torch.tensor([2])
    answers = clients.train(ids, send(method, server, ids), Turn(3))
    own, trained = clients.states[2].weights, tree.pick(answers.ups.weights, 0)
    net: Any = toy.network().double()
    v, w = plain.named(own, net), plain.named(trained, net)
    net.load_state_dict({n: 0.25 * v[n] + 0.75 * w[n] for n in v})
    x, y = data.test.client(2)
    expected = net((x.double() / 255 - 0.5) / 0.5)
    torch.testing.assert_close(method.client_predict(model, clients.states[2], Down(trained), x), expected)
    post = clients.score(ids, Down(answers.ups.weights), "test")
    assert post.weighted.tolist() == [int((expected.argmax(1) == y).sum())]


@pytest.mark.parametrize("settings", [{"share": -0.1}, {"share": 1.1}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CoterieError):
        APFL(**settings)
