"""FedNova against a loop written from the paper: normalized changes, and effective steps counted as they are taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.fednova import FedNova, Up
from tests import plain, toy

TRAINING = {"local_epochs": 2, "batch_size": 8, "lr": 0.05, "weight_decay": 1e-3}


def client(weights: dict[str, Tensor], i: int, turn: Turn, sgd: LocalTraining) -> tuple[dict[str, Tensor], float]:
    """The trained model, and |a_i|₁: how far each gradient of 1 has moved a weight, at a learning rate of 1."""
    net = toy.network().double()
    net.load_state_dict(weights)
    kind = {"momentum": sgd.momentum, "nesterov": sgd.nesterov}
    optimiser = torch.optim.SGD(net.parameters(), lr=sgd.lr * turn.rate, weight_decay=sgd.weight_decay, **kind)  # type: ignore[arg-type]
    counter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    counting = torch.optim.SGD([counter], lr=1.0, **kind)  # type: ignore[arg-type]
    for x, y in plain.batches(plain.data(), i, turn, sgd):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
        counter.grad = torch.ones_like(counter)
        counting.step()
    return plain.copy(net), -float(counter.detach())


@pytest.mark.parametrize(
    "how",
    [{}, {"momentum": 0.5}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "drop_last": True}],
    ids=["plain", "momentum", "nesterov", "drop-last"],
)
def test_three_rounds_equal_the_plain_implementation(how: dict[str, float]) -> None:
    """x <- x - τ_eff Σ p_i d_i with d_i = (x - w_i) / |a_i|₁ and τ_eff = Σ p_i |a_i|₁."""
    sgd, sizes = LocalTraining(**TRAINING, **how), plain.data().train.sizes  # type: ignore[arg-type]
    x = plain.copy(toy.network().double())
    for joined, turn in plain.ROUNDS:
        share = [sizes[i] / sum(sizes[j] for j in joined) for i in joined]
        models, steps = zip(*(client(x, i, turn, sgd) for i in joined), strict=True)
        reach = sum(p * a for p, a in zip(share, steps, strict=True))
        x = {
            n: t - reach * sum(p * (t - w[n]) / a for p, w, a in zip(share, models, steps, strict=True))
            for n, t in x.items()
        }
    server, _ = plain.federation(FedNova(train=sgd), plain.data(), toy.model())
    plain.assert_close(plain.named(server.weights, toy.network()), x)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg(momentum: float) -> None:
    """Sizes differ, but all clients take two steps an epoch."""
    data, sgd = toy.toy(train=(13, 16, 9, 12, 10)), LocalTraining(**TRAINING, momentum=momentum)  # type: ignore[arg-type]
    found, _ = plain.federation(FedNova(train=sgd), data, toy.model(batch_norm=True))
    averaged, _ = plain.federation(FedAvg(train=sgd), data, toy.model(batch_norm=True))
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) < 1e-12


def test_two_clients_by_hand() -> None:
    """8 and 24 samples in batches of 8, one epoch: 1 and 3 steps, τ_eff = 1/4 + 9/4 = 5/2.

    Both have moved by 6: 5/2 (1/4 * 6 + 3/4 * 2) = 7.5, where FedAvg would move by 6.
    """
    method = FedNova(train=LocalTraining(local_epochs=1, batch_size=8))
    server, _ = plain.federation(method, toy.toy(train=(8, 24), test=(3, 3)), toy.model(), [])
    ups = Up(tree.stack([tree.apply(lambda t: t + 6.0, server.weights)] * 2))
    after = method.server_receive(server, torch.tensor([0, 1]), ups)
    moved = after.weights.head["bias"] - server.weights.head["bias"]
    assert moved.tolist() == pytest.approx([7.5] * 4)


def test_without_local_epochs_nothing_moves() -> None:
    """No steps: nothing is divided by zero."""
    method = FedNova(train=LocalTraining(local_epochs=0))
    server, _ = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:1])
    assert toy.distance(tree.flatten(server.weights), tree.flatten(toy.model().start)) == 0


def test_momentum_starts_at_zero_in_every_round() -> None:
    """The effective steps assume it, so `keep_momentum` changes nothing."""
    kept, reset = (toy.looped(toy.method("fednova", keep_momentum=k), toy.model(), toy.toy())[0] for k in (True, False))
    toy.assert_same(kept, reset)


def test_effective_steps_of_full_momentum() -> None:
    """With momentum 1, gradient k counts in all steps after it: 1 + 2 + 3."""
    steps = torch.tensor([3.0], dtype=torch.float64)
    assert FedNova(train=LocalTraining(momentum=1.0)).effective(steps).item() == 6.0
    assert FedNova(train=LocalTraining(momentum=0.5)).effective(steps).item() == pytest.approx(1 + 1.5 + 1.75)
