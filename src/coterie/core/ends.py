"""Refuse networks that end in a sigmoid or softmax, where the loss applies one itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from coterie.core.errors import CoterieError
from coterie.core.forward import forward
from coterie.core.head import last_to_run
from coterie.core.packing import Inputs
from coterie.core.task import Task
from coterie.core.tasks import MultiLabel, Regression

FAR = 1e5  # factor on the weights of the last layer
SMALLEST = 0.01  # outputs that all stay below this may be zeros behind a ReLU


def check_end(network: nn.Module, x: Inputs, task: Task) -> None:
    """Refuse outputs (B, ...) that stay between 0 and 1 however large the last weights are, where any number is needed.

    A sigmoid or softmax is found wherever it is: as a module, or inside a `forward`.
    """
    if not takes_any_number(task):
        return
    found = extremes(network, x)
    if not found.isfinite().all() or found.min() < 0 or found.max() > 1 or found.max() < SMALLEST:
        return
    axis = task.class_axis or 1
    sums = found.sum(1 + axis) if found.ndim > 1 + axis else found.new_zeros(1)
    end = "softmax" if torch.allclose(sums, torch.ones_like(sums), atol=1e-3) else "sigmoid"
    takes = "standardized targets, which are also negative," if isinstance(task, Regression) else "logits"
    raise CoterieError(
        f"the network ends in a {end}: its outputs stay between 0 and 1, but the loss of {task.name} takes {takes} and "
        "so needs any number; remove this last activation"
    )


def takes_any_number(task: Task) -> bool:
    if isinstance(task, Regression):
        return bool((task.mean != 0).any() or (task.std != 1).any())
    return task.class_axis is not None or isinstance(task, MultiLabel)


def extremes(network: nn.Module, x: Inputs) -> Tensor:
    """(2, B, ...) outputs of a copy whose last layer is made far larger, with both signs."""
    trial, name = copy.deepcopy(network).eval(), last_to_run(network, x)
    own = dict((trial.get_submodule(name) if name else trial).named_parameters(recurse=False))
    prefix = f"{name}." if name else ""
    with torch.no_grad():
        moved = {
            prefix + n: FAR * (p + 0.05 * torch.arange(p.numel()).cos().view(p.shape).to(p))
            for n, p in own.items()
            if p.is_floating_point()
        }
        return torch.stack([forward(trial, x, {n: sign * p for n, p in moved.items()}) for sign in (1, -1)])
