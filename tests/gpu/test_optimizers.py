"""The fused steps of SGD and Adam against torch.optim. Without a GPU, Triton interprets the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from coterie.core import ops
from coterie.core.optimizers import STEPS, Adam, AdamW
from coterie.core.tree import Tree
from coterie.gpu import optimizers
from coterie.gpu.kernels import optimizers as kernels
from coterie.gpu.operations import Fused

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def few_tensors_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TOGETHER", 3)


RATE = torch.tensor(0.5, dtype=torch.float64)  # of a learning rate of 0.2


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_is_torchs_step(momentum: float) -> None:
    """Of more tensors than one launch takes, some of them longer than what one program does."""
    sizes = [1, 2 * kernels.TILE + 3, kernels.TILE, 5]
    weights = [torch.randn(size, dtype=torch.float64) for size in sizes]
    count = len(weights)
    slopes = [[torch.randn_like(w) for w in weights] for _ in range(2)]
    parameters = [w.clone().requires_grad_() for w in weights]
    optimiser = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, weight_decay=0.01)
    velocities: list[Tensor] = []
    for now in slopes:
        for p, slope in zip(parameters, now, strict=True):
            p.grad = slope
        optimiser.step()
        made = optimizers.sgd_step(RATE, None, 0.2, 0.01, momentum, count, *weights, *now, *velocities)
        weights, velocities = list(made[:count]), list(made[count:])
    for ours, theirs in zip(weights, parameters, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("rolling", [True, False], ids=["velocity", "first step"])
def test_who_is_not_active_does_not_move(rolling: bool) -> None:
    """Three clients, of two models each; the second client's batch is padding."""
    weight, slope, velocity = torch.randn(3, 3, 2, 5, 7, dtype=torch.float64).unbind()
    active = torch.tensor([True, False, True])

    def one(w: Tensor, g: Tensor, v: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
        moved, speed = optimizers.sgd_step(RATE, on, 0.2, 0.01, 0.5, 1, w, g, *[v] * rolling)
        return moved, speed

    models = vmap(one, in_dims=(0, 0, 0, None))
    moved, speed = vmap(models)(weight, slope, velocity, active)
    before = velocity if rolling else torch.zeros_like(velocity)
    on = active[:, None, None, None]
    expected = slope + 0.01 * weight + 0.5 * before
    torch.testing.assert_close(speed, torch.where(on, expected, before), rtol=0, atol=1e-15)
    torch.testing.assert_close(moved, torch.where(on, weight - 0.1 * expected, weight), rtol=0, atol=1e-15)
    assert torch.equal(moved[1], weight[1])


def test_each_client_may_have_its_own_rate() -> None:
    """Three clients, of two models each."""
    weight, slope = torch.randn(2, 3, 2, 5, 7, dtype=torch.float64).unbind()
    rates, active = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64), torch.tensor([True, True, False])

    def one(w: Tensor, g: Tensor, rate: Tensor, on: Tensor) -> Tensor:
        return optimizers.sgd_step(rate, on, 0.2, 0.0, 0.0, 1, w, g)[0]

    moved = vmap(vmap(one, in_dims=(0, 0, None, None)))(weight, slope, rates, active)
    scale = (0.2 * rates * active)[:, None, None, None]
    torch.testing.assert_close(moved, weight - scale * slope, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("rule", "kind"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_step_of_adam_is_torchs_step(rule: type[Adam], kind: type[Any], dtype: torch.dtype, most: float) -> None:
    """Of more tensors than one launch takes, some of them longer than what one program does."""
    sizes = [1, kernels.TILE + 3, 7, 5]
    parameters = {str(size): torch.randn(size, dtype=dtype).requires_grad_() for size in sizes}
    weights: Tree = {n: p.detach().clone() for n, p in parameters.items()}
    optimizer = kind(parameters.values(), lr=0.1, weight_decay=0.3, betas=(0.8, 0.95), eps=0.01)
    ours = rule(lr=0.2, weight_decay=0.3, beta1=0.8, beta2=0.95, eps=0.01)
    state: Tree = {}
    for _ in range(2):
        slopes = {n: torch.randn_like(w) for n, w in weights.items()}
        for n, p in parameters.items():
            p.grad = slopes[n]
        optimizer.step()
        with ops.use(Fused()):
            weights, state = ours.step(weights, slopes, state, RATE.to(dtype))
    for n, p in parameters.items():
        torch.testing.assert_close(weights[n], p.detach(), rtol=0, atol=most)


@pytest.mark.parametrize("rule", [Adam(weight_decay=0.1), AdamW(weight_decay=0.1)])
def test_each_client_has_its_own_steps_of_adam(rule: Adam) -> None:
    """Three clients, of two models each, after 0, 1 and 5 steps; the batch of the second is padding."""
    weight, slope = torch.randn(2, 3, 2, 5, 7, dtype=torch.float64).unbind()
    rates, active = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64), torch.tensor([True, False, True])
    steps = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    first, second = torch.randn(3, 2, 5, 7, dtype=torch.float64), torch.rand(3, 2, 5, 7, dtype=torch.float64)

    def one(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor, rate: Tensor, on: Tensor) -> Tree:
        moved, state = rule.step({"w": w}, {"w": g}, {STEPS: t, "first.w": m, "second.w": v}, rate, on)
        return moved | state

    step = vmap(vmap(one, in_dims=(0, 0, 0, 0, None, None, None)))
    given = (weight, slope, first, second, steps, rates, active)
    expected = step(*given)
    with ops.use(Fused()):
        made = step(*given)
    for name, t in expected.items():
        torch.testing.assert_close(made[name], t, rtol=0, atol=1e-14)
    assert torch.equal(made["w"][1], weight[1])
    assert torch.equal(made["first.w"][1], first[1])
    assert torch.equal(made["second.w"][1], second[1])
    assert made[STEPS][:, 0].tolist() == [1.0, 1.0, 6.0]
