"""AFL against plain loops, and its projection against a quadratic program and cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from coterie.core import tree
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.afl import AFL, Up, onto_simplex
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),  # there already
        ([1.2, 1.3, 1.5], [0.2, 0.3, 0.5]),  # a constant changes nothing
        ([2.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ([0.7, 0.6, -3.0], [0.55, 0.45, 0.0]),
        ([0.0], [1.0]),
    ],
)
def test_projection_by_hand(point: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(onto_simplex(torch.tensor(point).double()), torch.tensor(expected).double())


def test_projection_is_the_nearest_point() -> None:
    draw = np.random.default_rng(0)
    for size in (2, 3, 7):
        v = draw.normal(size=size)
        found = minimize(
            lambda x, v=v: np.sum((x - v) ** 2),
            np.full(size, 1 / size),
            bounds=[(0, 1)] * size,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
            tol=1e-12,
        )
        np.testing.assert_allclose(onto_simplex(torch.tensor(v)).numpy(), found.x, atol=1e-5)


def simplex(v: np.ndarray) -> np.ndarray:
    """By bisection on the shift."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


@pytest.mark.parametrize("rate", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_three_rounds_equal_the_plain_implementation(rate: float, batch_norm: bool) -> None:
    data, w, mixture = plain.data(), plain.copy(toy.network(batch_norm).double()), np.full(5, 0.2)
    for joined, turn in plain.ROUNDS:
        losses = np.array([plain.mean_loss(w, data, i) for i in joined])
        share = mixture[joined] if mixture[joined].sum() else np.ones(3)
        w = plain.mean([plain.locally(w, data, i, turn, SGD) for i in joined], share.tolist())
        mixture[joined] += rate * (losses - losses.mean())
        mixture = simplex(mixture)
    method = AFL(train=SGD, mixture_lr=rate)
    server, _ = plain.federation(method, data, toy.model(batch_norm=batch_norm))
    np.testing.assert_allclose(server.mixture.numpy(), mixture, atol=1e-10)
    plain.assert_close(plain.named(server.weights, toy.network(batch_norm)), w)


def up(weights: list[float], losses: list[float]) -> Up:
    start = toy.model().start
    rows = [tree.apply(lambda t, v=v: torch.full_like(t, v), start) for v in weights]
    return Up(tree.stack(rows), torch.tensor(losses).double())


def test_two_clients_by_hand() -> None:
    """λ = (1/2, 1/2): the model is the mean; losses 1 and 2 move λ by -0.5 γ and +0.5 γ."""
    method, data = AFL(train=SGD, mixture_lr=0.4), toy.toy(train=(3, 9), test=(1, 1))
    server, _ = plain.federation(method, data, toy.model(), [])
    after = method.server_receive(server, torch.tensor([0, 1]), up([1.0, 3.0], [1.0, 2.0]))
    assert after.mixture.tolist() == pytest.approx([0.3, 0.7])
    assert after.weights.head["bias"].tolist() == pytest.approx([2.0] * 4)
    again = method.server_receive(after, torch.tensor([0, 1]), up([1.0, 3.0], [1.0, 1.0]))
    assert again.weights.head["bias"].tolist() == pytest.approx([0.3 * 1 + 0.7 * 3] * 4)
    assert again.mixture.tolist() == pytest.approx([0.3, 0.7])


def test_without_a_step_it_is_uniform_fedavg() -> None:
    """SCAFFOLD's uniform weights: twenty samples count as much as eight."""
    method = AFL(train=SGD, mixture_lr=0.0)
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    after = method.server_receive(server, torch.tensor([1, 4]), up([1.0, 3.0], [0.1, 9.0]))
    assert after.weights.head["bias"].tolist() == pytest.approx([2.0] * 4)
    assert after.mixture.tolist() == [0.2] * 5


def test_absent_clients_keep_their_weight_and_weightless_ones_count_alike() -> None:
    method = AFL(train=SGD, mixture_lr=100.0)
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    server = server._replace(mixture=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]).double())
    after = method.server_receive(server, torch.tensor([0, 1]), up([1.0, 3.0], [5.0, 5.0]))
    assert after.weights.head["bias"].tolist() == pytest.approx([2.0] * 4)
    assert after.mixture.tolist() == [0, 0, 1, 0, 0]


@pytest.mark.long
def test_the_worst_client_is_better_off() -> None:
    data, model = plain.line()
    rounds = [([0, 1, 2], Turn(t)) for t in range(200)]
    worst = []
    for rate in (0.0, 0.3):
        method = AFL(train=LocalTraining(local_epochs=1, batch_size=12, lr=0.3), mixture_lr=rate)
        server, _ = plain.federation(method, data, model, rounds)
        w, b = (server.weights.head[n] for n in ("weight", "bias"))
        losses = [float(torch.nn.functional.cross_entropy(x @ w.T + b, y)) for x, y in map(data.train.client, range(3))]
        worst.append(max(losses))
    assert worst[1] < worst[0] - 0.01
    assert float(method.server_report(server)["mixture"].sum()) == pytest.approx(1.0)
