"""FedSAM against loops with torch's modules: two gradients a step, the second one at the worst point nearby."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.data import FederatedData, Split
from coterie.core.model import make_model
from coterie.core.tasks import Regression
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedsam import FedSAM
from coterie.privacy import Protection
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def locally(
    w: dict[str, Tensor], data: FederatedData, i: int, turn: Turn, sgd: LocalTraining, radius: float
) -> dict[str, Tensor]:
    """The authors' order: climb, differentiate, return, descend."""
    batch_norm = any("running" in n for n in w)
    net, climber = toy.network(batch_norm).double(), toy.network(batch_norm).double()
    net.load_state_dict(w, strict=False)
    optimizer = plain.optimiser(net.parameters(), sgd, turn)
    for x, y in plain.batches(data, i, turn, sgd):
        climber.load_state_dict(net.state_dict())
        F.cross_entropy(climber(x), y).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in climber.parameters()))  # type: ignore[union-attr]
        climber.load_state_dict(net.state_dict())  # the first pass leaves no statistics
        with torch.no_grad():
            for p in climber.parameters():
                assert p.grad is not None
                p.add_(p.grad, alpha=radius / norm)
        climber.zero_grad()
        F.cross_entropy(climber(x), y).backward()
        for p, q in zip(net.parameters(), climber.parameters(), strict=True):
            p.grad = q.grad
        nn.utils.clip_grad_norm_(net.parameters(), sgd.clip_gradient or math.inf)
        optimizer.step()
        climber.zero_grad()
        for a, b in zip(net.buffers(), climber.buffers(), strict=True):
            a.copy_(b)
    return plain.copy(net)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("by_samples", [False, True])
@pytest.mark.parametrize("radius", [0.05, 0.5])
def test_three_rounds_equal_the_plain_implementation(radius: float, by_samples: bool, batch_norm: bool) -> None:
    data, w = plain.data(), plain.copy(toy.network(batch_norm).double())
    for joined, turn in plain.ROUNDS:
        trained = [locally(w, data, i, turn, SGD, radius) for i in joined]
        w = plain.mean(trained, [data.train.sizes[i] if by_samples else 1 for i in joined])
    method = FedSAM(train=SGD, radius=radius, weight_by_samples=by_samples)
    server, _ = plain.federation(method, data, toy.model(batch_norm=batch_norm))
    plain.assert_close(plain.named(server.weights, toy.network(batch_norm)), w)


def test_a_radius_of_zero_is_fedavg() -> None:
    found, _ = toy.looped(FedSAM(train=SGD, radius=0.0, weight_by_samples=True), toy.model(), toy.toy())
    expected, _ = toy.looped(FedAvg(train=SGD), toy.model(), toy.toy())
    toy.assert_same(found, {n: t for n, t in expected.items() if "tuned" not in n})


def test_a_step_on_a_parabola_by_hand() -> None:
    """Regression of y = 0 on x = 1 with one weight: f(w) = w², g = 2w; at w + ρ the gradient is 2 (w + ρ).

    From w = 3 with ρ = 0.5 and a rate of 0.1: 3 - 0.1 * 2 * 3.5 = 2.3. Two clients: the mean of equals.
    """

    split = Split(torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64), (1, 1))
    task = Regression(1)
    data = FederatedData("one", 0, split, split, task=task)
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        network[1].weight.fill_(3.0)
    model = make_model(network, (1,), task, label=(1,)).to("cpu", torch.float64)
    method = FedSAM(train=LocalTraining(local_epochs=1, batch_size=1, lr=0.1), radius=0.5)
    server, _ = plain.federation(method, data, model, [([0, 1], Turn(0))])
    assert float(server.weights.head["weight"]) == pytest.approx(2.3)


def test_clipping_applies_to_the_step_not_to_the_climb() -> None:
    sgd = SGD.but(clip_gradient=0.01)
    data, w = plain.data(), plain.copy(toy.network().double())
    expected = plain.mean([locally(w, data, i, Turn(0), sgd, 0.5) for i in (0, 1)], [1, 1])
    server, _ = plain.federation(FedSAM(train=sgd), data, toy.model(), [([0, 1], Turn(0))])
    found = plain.named(server.weights, toy.network())
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-7)  # torch divides by norm + 1e-6 too


def test_sample_level_privacy_pays_for_both_gradients() -> None:
    """Two Gaussian mechanisms on every batch cost as much as one with 1/√2 of the noise."""
    protection, sample = Protection(dp="sample", dp_noise=1.0), torch.zeros(1, *toy.SHAPE, dtype=torch.uint8)
    (one,), (two,) = (
        protection.answer_cost(kind(train=SGD.but(local_epochs=1)), toy.model(), sample, True)(40)
        for kind in (FedAvg, FedSAM)
    )
    assert (one.times, two.times) == (5, 5)
    assert two.noise == pytest.approx(one.noise / math.sqrt(2))


def test_a_model_without_a_gradient_stays() -> None:
    """At a norm of zero there is no direction; nothing becomes NaN."""
    sgd = LocalTraining(local_epochs=1, batch_size=8, lr=0.05)

    model = toy.model()
    flat = model.task.loss
    model.task.loss = lambda output, y: 0 * flat(output, y)  # type: ignore[method-assign]
    server, _ = plain.federation(FedSAM(train=sgd), plain.data(), model, plain.ROUNDS[:1])
    plain.assert_close(plain.named(server.weights, toy.network()), plain.copy(toy.network().double()))
