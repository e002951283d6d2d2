"""The fused SGD step against torch.optim. Without a GPU, Triton interprets the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from coterie.gpu import optimizers
from coterie.gpu.kernels import optimizers as kernels

pytestmark = pytest.mark.usefixtures("interpreted")
RATE = torch.tensor(0.5, dtype=torch.float64)  # of a learning rate of 0.2


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_is_torchs_step(momentum: float) -> None:
    """Of more tensors than one launch takes, some of them longer than what one program does."""
    sizes = [1, 2 * kernels.TILE + 3, kernels.TILE, *range(2, kernels.TOGETHER)]
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
