"""FedAdagrad, FedYogi and FedAdam against Algorithm 2 of the paper, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie import make_method
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedopt import FedOpt, Server, Up
from tests import plain, toy

RULES = ("adagrad", "yogi", "adam")
SGD = LocalTraining(local_epochs=1, batch_size=8, lr=0.05, momentum=0.5)


def sent(*values: float) -> Up:
    start = toy.model().start
    return Up(tree.stack([tree.apply(lambda t, v=v: t + v, start) for v in values]), torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("rule", RULES)
def test_rounds_equal_algorithm_2(rule: str) -> None:
    """The clients' models differ from the initial one by random numbers, in five rounds."""
    method = FedOpt(server_optimizer=rule, server_lr=0.1)
    start = toy.model().start.head["bias"]
    server = plain.federation(method, plain.data(), toy.model(), [])[0]
    x, m, v = start.numpy().copy(), np.zeros(4), np.full(4, 1e-6)
    draw = np.random.default_rng(0)
    for _ in range(5):
        offsets = draw.normal(size=2)
        change = (start.numpy() + offsets[0] + 3 * (start.numpy() + offsets[1])) / 4 - x  # 1 and 3 samples
        m = 0.9 * m + 0.1 * change
        square = change**2
        v = {
            "adagrad": v + square,
            "yogi": v - 0.01 * square * np.sign(v - square),
            "adam": 0.99 * v + 0.01 * square,
        }[rule]
        x = x + 0.1 * m / (np.sqrt(v) + 1e-3)
        server = method.server_receive(server, torch.tensor([0, 1]), sent(*offsets.tolist()))
        np.testing.assert_allclose(server.weights.head["bias"].numpy(), x, rtol=1e-10, atol=1e-12)


def test_the_first_step_by_hand() -> None:
    """No correction of moments: Δ = 2 gives m = 0.2 and v = 1e-6 + 0.04, so FedAdam moves by 0.01 * 0.2 / 0.201."""
    method = FedOpt()
    server = plain.federation(method, plain.data(), toy.model(), [])[0]
    after = method.server_receive(server, torch.tensor([0, 1]), sent(-1.0, 3.0))
    moved = after.weights.head["bias"] - server.weights.head["bias"]
    expected = 0.01 * 0.2 / ((0.99e-6 + 0.04) ** 0.5 + 1e-3)
    assert moved.tolist() == pytest.approx([expected] * 4, rel=1e-9)


def test_yogi_forgets_a_large_change_additively() -> None:
    """v falls by (1 - β2) Δ², whatever v is; Adam's falls by a share of v."""
    method = FedOpt(server_optimizer="yogi")
    v, change = torch.tensor([100.0, 0.01], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    assert method.spread(v, change).tolist() == pytest.approx([99.99, 0.02])
    assert FedOpt().spread(v, change).tolist() == pytest.approx([99.01, 0.0199])


def test_without_adaptivity_it_is_fedavg() -> None:
    """With τ so large that v vanishes next to it and a learning rate of τ, the step is the mean change."""
    large = 1e8
    method = FedOpt(train=SGD, server_lr=2 * large, server_beta1=0.0, server_eps=large)  # √v + τ = 2 τ at the start
    first = plain.ROUNDS[:1]
    found, _ = plain.federation(method.but(server_optimizer="adagrad"), plain.data(), toy.model(), first)
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model(), first)
    assert toy.distance(tree.flatten(found.weights), tree.flatten(averaged.weights)) < 1e-10


def test_names_of_the_family() -> None:
    found = {name: make_method(name) for name in ("fedadagrad", "fedyogi", "fedadam")}
    assert {name: (m.server_optimizer, m.server_beta1, m.server_lr) for name, m in found.items()} == {
        "fedadagrad": ("adagrad", 0.0, 0.1),
        "fedyogi": ("yogi", 0.9, 0.01),
        "fedadam": ("adam", 0.9, 0.01),
    }
    with pytest.raises(CoterieError, match="unknown server optimizer 'adamw'"):
        FedOpt(server_optimizer="adamw")


def test_statistics_of_batchnorm_are_averaged() -> None:
    server, _ = plain.federation(FedOpt(train=SGD), plain.data(), toy.model(batch_norm=True), plain.ROUNDS[:1])
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model(batch_norm=True), plain.ROUNDS[:1])
    assert isinstance(server, Server)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(server.weights.encoder[name], averaged.weights.encoder[name])
