"""Per-FedAvg against plain loops with torch's autograd: first order, and the exact meta-gradient by double backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import keys
from coterie.federation import Settings, federate
from coterie.methods.fedavg import FedAvg
from coterie.methods.per_fedavg import PerFedAvg
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
Pair = tuple[Tensor, Tensor]


def inner_batches(client: int, turn: Turn) -> list[Pair]:
    """Batches of the second, independent order of the client's samples."""
    x, y = plain.data().train.client(client)
    x = (x.double() / 255 - 0.5) / 0.5
    key = random.derive(keys(plain.SEED, turn, torch.tensor(client)), random.EXPLORE)
    orders = [random.shuffle(random.derive(key, random.SHUFFLE, epoch), len(y)) for epoch in range(SGD.local_epochs)]
    return [(x[index], y[index]) for order in orders for index in torch.split(order, SGD.batch_size)]


def meta_gradient(net: torch.nn.Module, inner: Pair, outer: Pair, alpha: float, exact: bool) -> dict[str, Tensor]:
    """Of f(w - α ∇f(w; D); D') in w: through the inner step, or as if its gradient were a constant."""
    w = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    loss = F.cross_entropy(functional_call(net, w, (inner[0],)), inner[1])
    slope = torch.autograd.grad(loss, list(w.values()), create_graph=exact)
    adapted = {n: t - alpha * g for (n, t), g in zip(w.items(), slope, strict=True)}
    after = F.cross_entropy(functional_call(net, adapted, (outer[0],)), outer[1])
    return dict(zip(w, torch.autograd.grad(after, list(w.values())), strict=True))


def client(weights: dict[str, Tensor], i: int, turn: Turn, alpha: float, exact: bool) -> dict[str, Tensor]:
    net = toy.network().double()
    net.load_state_dict(weights)
    optimiser = plain.optimiser(net.parameters(), SGD, turn)
    for inner, outer in zip(inner_batches(i, turn), plain.batches(plain.data(), i, turn, SGD), strict=True):
        slope = meta_gradient(net, inner, outer, alpha, exact)
        for n, p in net.named_parameters():
            p.grad = slope[n]
        optimiser.step()
    return plain.copy(net)


def federation(alpha: float, exact: bool, by_samples: bool = False) -> dict[str, Tensor]:
    sizes, weights = plain.data().train.sizes, plain.copy(toy.network().double())
    for joined, turn in plain.ROUNDS:
        models = [client(weights, i, turn, alpha, exact) for i in joined]
        weights = plain.mean(models, [sizes[i] if by_samples else 1 for i in joined])
    return weights


@pytest.mark.parametrize("by_samples", [False, True])
def test_first_order_equals_the_plain_implementation(by_samples: bool) -> None:
    """Clients of 8 to 31 samples, which count equally by default."""
    method = PerFedAvg(train=SGD, inner_lr=0.1, **({"weight_by_samples": True} if by_samples else {}))
    server, _ = plain.federation(method, plain.data(), toy.model())
    plain.assert_close(plain.named(server.weights, toy.network()), federation(0.1, exact=False, by_samples=by_samples))


def test_hessian_free_equals_the_exact_gradient() -> None:
    """With a δ that crosses no kink of the activations; the first-order variant is elsewhere."""
    expected = federation(0.1, exact=True)
    apart = {}
    for order in ("hessian-free", "first-order"):
        method = PerFedAvg(train=SGD, inner_lr=0.1, order=order, difference=1e-6)
        server, _ = plain.federation(method, plain.data(), toy.model())
        found = plain.named(server.weights, toy.network())
        apart[order] = max(float((found[n] - t).abs().max()) for n, t in expected.items())
    assert apart["hessian-free"] < 1e-10
    assert apart["first-order"] > 1e-4


@pytest.mark.parametrize("order", ["first-order", "hessian-free"])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_with_an_inner_rate_of_zero_it_is_fedavg(order: str, batch_norm: bool) -> None:
    """Every sample is used once an epoch in the outer step, in FedAvg's order."""
    method = PerFedAvg(train=SGD, inner_lr=0.0, order=order, weight_by_samples=True)
    found, _ = plain.federation(method, plain.data(), toy.model(batch_norm=batch_norm))
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model(batch_norm=batch_norm))
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) < 1e-13


def test_a_round_trains_once() -> None:
    """As many steps as local training has: one epoch of one batch is one step (elsewhere a round trains twice)."""
    data, sgd = plain.data(), LocalTraining(local_epochs=1, batch_size=31, lr=0.1)
    method = PerFedAvg(train=sgd, inner_lr=0.2)
    server, _ = plain.federation(method, data, toy.model(), [([3], Turn(0))])
    net = toy.network().double()
    ((x, y),) = plain.batches(data, 3, Turn(0), sgd)  # D and D' are the same 31 samples
    slope = meta_gradient(net, (x, y), (x, y), 0.2, exact=False)
    expected = {n: p.detach() - 0.1 * slope[n] for n, p in net.named_parameters()}
    plain.assert_close(plain.named(server.weights, net), expected)


def test_the_personal_model_is_one_step_from_the_shared_one() -> None:
    """On one batch, with the inner rate, no momentum or weight decay, whatever the schedule of learning rates."""
    data = toy.toy(train=(13, 20, 9, 31, 8), augmented=False)
    method = PerFedAvg(train=replace(SGD, batch_size=31), inner_lr=0.3)
    clients = Looped(method, toy.model(), data, 7, processes=1)
    server, history = federate(clients, Settings(rounds=2, seed=7))
    assert ("finished", "test") in history[-1].scores
    net = toy.network().double()
    net.load_state_dict(plain.named(server.weights, net))
    x, y = data.train.client(1)
    F.cross_entropy(net((x.double() / 255 - 0.5) / 0.5), y).backward()
    expected = {n: p.detach() - 0.3 * p.grad for n, p in net.named_parameters() if p.grad is not None}
    plain.assert_close(plain.named(clients.states[1].tuned, net), expected)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_hessian_free_stacked_equals_looped(batch_norm: bool) -> None:
    method, model = toy.method("per-fedavg", order="hessian-free", inner_lr=0.1), toy.model(batch_norm=batch_norm)
    looped, stacked = (run(method, model, toy.toy(), rounds=2)[0] for run in (toy.looped, toy.stacked))
    assert toy.distance(looped, stacked) < 1e-8  # differences of gradients are divided by 2 δ


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(CoterieError, match="unknown order 'second'"):
        PerFedAvg(order="second")


@pytest.mark.parametrize(
    ("order", "by_samples", "expected"),
    [
        ("first-order", False, 1.2),
        ("first-order", True, 1.5),
        ("hessian-free", False, 1.16),
        ("hessian-free", True, 1.4),
    ],
)
def test_a_round_of_two_clients_by_hand(order: str, by_samples: bool, expected: float) -> None:
    """f_i(w) = (w - y_i)², y = 0 and 3, from w = 1 with α = 0.1 and η = 0.25.

    After the inner step w - y_i is 1 - 2α = 0.8 of what it was, and the Hessian 2 makes the meta-gradient 0.8 of that
    again: steps to 0.6 and 1.8, or 0.68 and 1.64. Clients have 1 and 3 samples.
    """
    data, model = plain.parabolas()
    sgd = LocalTraining(local_epochs=1, batch_size=3, lr=0.25, momentum=0.0)
    method = PerFedAvg(train=sgd, inner_lr=0.1, order=order, weight_by_samples=by_samples)
    server, clients = plain.federation(method, data, model, [([0, 1], Turn(0))])
    assert float(server.weights.head["weight"]) == pytest.approx(expected)
    for i, target in enumerate((0.0, 3.0)):  # the personal model: an inner step
        rows = slice(i, 1 + 3 * i)
        rate = torch.ones((), dtype=torch.float64)
        own = Data(data.train.x[rows], data.train.y[rows], random.seed_key(0), rate, 0, data.transform, alone=True)
        tuned = method.client_finish(model, clients.states[i], method.server_send(server, torch.tensor(i)), own).tuned
        assert float(tuned.head["weight"]) == pytest.approx(expected - 0.2 * (expected - target))
