"""Optimizers are those of torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.optimizers import OPTIMIZERS
from coterie.core.training import LocalTraining

STEPS = 50
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.05}, "SGD", {"lr": 0.05}),
    ("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, "SGD",
     {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "SGD",
     {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adam", {}, "Adam", {}),
    ("adam", {"lr": 0.02, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}, "Adam",
     {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    ("adamw", {}, "AdamW", {}),
    ("adamw", {"lr": 0.02, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95}, "AdamW",
     {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.95)}),
    ("adagrad", {}, "Adagrad", {}),
    ("adagrad", {"lr": 0.1, "weight_decay": 0.2, "eps": 1e-5}, "Adagrad",
     {"lr": 0.1, "weight_decay": 0.2, "eps": 1e-5}),
]  # fmt: skip


def problem(seed: int = 0) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Weights, and the slopes of a quadratic loss, other ones at each step."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"layer.weight": (3, 4), "layer.bias": (3,)}

    def draw() -> dict[str, Tensor]:
        return {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, shape in shapes.items()}

    return draw(), [draw() for _ in range(STEPS)]


def gradient(weights: dict[str, Tensor], slopes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: w + slopes[n] for n, w in weights.items()}


@pytest.mark.parametrize(("name", "ours", "theirs", "settings"), CASES)
def test_fifty_steps_are_those_of_torch(name: str, ours: dict[str, Any], theirs: str, settings: dict[str, Any]) -> None:
    weights, slopes = problem()
    leaves = {n: t.clone().requires_grad_() for n, t in weights.items()}
    optimizer = getattr(torch.optim, theirs)(leaves.values(), **settings)
    rule, state, one = LocalTraining(optimizer=name, **ours).rule, {}, torch.ones((), dtype=torch.float64)
    for slope in slopes:
        for n, leaf in leaves.items():
            leaf.grad = gradient(leaves, slope)[n].detach()
        optimizer.step()
        weights, state = rule.step(weights, gradient(weights, slope), state, one)
    for n, leaf in leaves.items():
        assert (weights[n] - leaf).abs().max() < 1e-12


@pytest.mark.parametrize(("name", "ours"), [case[:2] for case in CASES])
def test_a_step_of_padding_changes_nothing(name: str, ours: dict[str, Any]) -> None:
    weights, slopes = problem()
    rule, state, rate = LocalTraining(optimizer=name, **ours).rule, {}, torch.tensor(0.5, dtype=torch.float64)
    for at, slope in enumerate(slopes[:6]):
        before, kept = weights, state
        weights, state = rule.step(weights, gradient(weights, slope), state, rate, torch.tensor(at % 2 == 0))
        if at % 2:
            assert all(torch.equal(weights[n], before[n]) for n in weights)
            assert all(torch.equal(state[n], kept[n]) for n in state)
    alone, memory = problem()[0], {}
    for slope in slopes[0:6:2]:
        alone, memory = rule.step(alone, gradient(alone, slope), memory, rate)
    assert all(torch.equal(weights[n], alone[n]) for n in weights)
    assert state.keys() == memory.keys()


@pytest.mark.parametrize(("name", "ours"), [case[:2] for case in CASES])
def test_stacked_clients_are_those_alone(name: str, ours: dict[str, Any]) -> None:
    rule, rate = LocalTraining(optimizer=name, **ours).rule, torch.tensor(0.5, dtype=torch.float64)
    clients = [problem(seed) for seed in range(3)]

    def train(weights: dict[str, Tensor], slopes: list[dict[str, Tensor]]) -> tuple[Any, Any]:
        state = rule.init(weights)
        for slope in slopes:
            weights, state = rule.step(weights, gradient(weights, slope), state, rate)
        return weights, state

    stacked = torch.func.vmap(train)(*tree.stack([(w, tuple(s[:5])) for w, s in clients]))
    for client, (weights, slopes) in enumerate(clients):
        for got, expected in zip(tree.leaves(tree.pick(stacked, client)), tree.leaves(train(weights, slopes[:5])),
                                 strict=True):  # fmt: skip
            assert torch.allclose(got, expected, rtol=0, atol=1e-14)


def test_the_number_of_steps_is_exact_in_half_precision() -> None:
    """In bfloat16, 256 + 1 is 256, and the bias correction would stay there."""
    weights = {"w": torch.ones(2, dtype=torch.bfloat16)}
    rule = OPTIMIZERS["adam"](lr=0.0)
    state = rule.init(weights) | {"steps": torch.tensor(256.0)}
    moved, after = rule.step(weights, weights, state, torch.ones((), dtype=torch.bfloat16))
    assert rule.init(weights)["steps"].dtype == torch.float32
    assert float(after["steps"]) == 257.0
    assert moved["w"].dtype == after["first.w"].dtype == torch.bfloat16


def test_defaults_are_those_of_the_optimizer() -> None:
    assert LocalTraining().lr == LocalTraining(optimizer="adagrad").lr == 0.01
    assert LocalTraining(optimizer="adam").lr == LocalTraining(optimizer="adamw").lr == 0.001
    assert LocalTraining(optimizer="adamw").weight_decay == 0.01
    assert LocalTraining(optimizer="adamw", weight_decay=0.0, lr=0.5).but(batch_size=3).rule == OPTIMIZERS["adamw"](
        lr=0.5, weight_decay=0.0
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm': did you mean 'adam'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum is not a setting of adamw; it is one of sgd"),
        ({"optimizer": "sgd", "beta1": 0.9}, "beta1 is not a setting of sgd; it is one of adam, adamw"),
        ({"optimizer": "adam", "beta2": 1.0}, "beta2 must be at least 0 and below 1, got 1.0"),
        ({"optimizer": "adagrad", "eps": 0.0}, "eps must be above 0, got 0.0"),
    ],
)
def test_settings_of_another_optimizer_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CoterieError, match=message):
        LocalTraining(**wrong)
