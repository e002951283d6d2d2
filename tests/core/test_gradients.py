"""Gradients of stacked clients against torch.func, and what they must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from coterie.core.gradients import autograd_gradient, functional_gradient
from coterie.core.tree import Tree


def objective(weights: Tree, statistics: Tree) -> tuple[Tensor, Tree]:
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    loss = F.softplus(x @ weights["w"] + statistics["mean"]).square().mean()
    return loss, {"mean": statistics["mean"] * 0.9 + loss.detach()}


def given(clients: int) -> tuple[Tree, Tree]:
    torch.manual_seed(0)
    weights = {
        "w": torch.randn(clients, 3, dtype=torch.float64),
        "unused": torch.randn(clients, 2, dtype=torch.float64),
    }
    return weights, {"mean": torch.randn(clients, dtype=torch.float64)}


@pytest.mark.long
def test_as_torch_does_it() -> None:
    weights, statistics = given(4)
    expected = vmap(grad(objective, has_aux=True))(weights, statistics)
    made = vmap(lambda w, s: functional_gradient(objective, w, s))(weights, statistics)
    for ours, theirs in zip(made, expected, strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-15)
    alone = autograd_gradient(
        objective, {n: t[0] for n, t in weights.items()}, {n: t[0] for n, t in statistics.items()}
    )
    torch.testing.assert_close(alone[0]["w"], expected[0]["w"][0], rtol=0, atol=1e-15)
    assert not alone[0]["unused"].any()


def test_what_nothing_depends_on_has_no_slope() -> None:
    weights, statistics = given(3)

    def constant(w: Tree, s: Tree) -> tuple[Tensor, Tree]:
        return s["mean"].sum(), s

    made, _ = vmap(lambda w, s: functional_gradient(constant, w, s))(weights, statistics)
    assert not any(t.any() for t in made.values())


@pytest.mark.long
def test_training_does_not_load_a_compiler() -> None:
    """It would take seconds at the start of every run."""
    code = (
        "import sys, coterie\n"
        "data = coterie.load_clients('fashion-mnist-small', num_clients=2, local_size=20, test_size=5)\n"
        "coterie.run('fedper', data, 'cnn', rounds=1, backend='stacked')\n"
        "assert 'torch._dynamo' not in sys.modules, 'torch._dynamo was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
