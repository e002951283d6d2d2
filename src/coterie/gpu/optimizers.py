"""The SGD and Adam steps of many clients and all their weights, 16 tensors per launch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.core import ops
from coterie.gpu.registration import Operation, in_front

LEADING, ADAM_LEADING = 6, 7  # inputs before the tensors


def _kernel(
    rate: Tensor, active: Tensor | None, lr: float, decay: float, momentum: float, count: int, tensors: list[Tensor]
) -> list[Tensor]:
    """A step of `count` weights of any shape; with momentum, their velocities follow them.

    rate (), or (c,) if it differs between clients: factor on lr. active (c,): False where nothing changes; None: all
    change. tensors: weights, gradients and, unless they are zero, velocities; each with the client axis in front if
    active or rate has.
    """
    from coterie.gpu.kernels import optimizers

    rows = None if active is None else active.contiguous()
    if active is not None or rate.ndim or not alike(tensors, count):
        tensors = [t.contiguous() for t in tensors]
    weights, gradients, velocities = grouped(tensors, count)
    made = optimizers.descend(weights, gradients, velocities, rate.contiguous(), rows, lr, decay, momentum)
    return [t for part in made for t in part]


def _reference(
    rate: Tensor, active: Tensor | None, lr: float, decay: float, momentum: float, count: int, tensors: list[Tensor]
) -> list[Tensor]:
    weights, gradients, velocities = grouped(tensors, count)
    plain, moved, speeds = ops.Operations().sgd_step, list[Tensor](), list[Tensor]()
    for at, (w, g) in enumerate(zip(weights, gradients, strict=True)):
        made = plain([w], [g], velocities[at : at + 1], per_client(rate, w), None, lr, decay, momentum)
        moved, speeds = moved + made[0], speeds + made[1]
    if active is None:
        return [*moved, *speeds]
    before = [*weights, *(velocities or [torch.zeros_like(t) for t in speeds])]
    return [torch.where(per_client(active, t), new, t) for new, t in zip([*moved, *speeds], before, strict=True)]


def _adam_kernel(
    scales: Tensor, active: Tensor | None, decay: float, beta1: float, beta2: float, eps: float, count: int,
    tensors: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """A step of `count` weights of any shape, then their first and their second moments.

    scales: (3,), or (c, 3) for each client, as in `ops.adam_step`. active (c,): False where nothing changes; None: all
    change. tensors: weights, gradients, first and second moments; each with the client axis in front if scales has.
    """
    from coterie.gpu.kernels import optimizers

    rows = None if active is None else active.contiguous()
    if scales.ndim > 1 or not alike(tensors, count):
        tensors = [t.contiguous() for t in tensors]
    weights, gradients, first, second = grouped(tensors, count)
    settings = (decay, beta1, beta2, eps)
    made = optimizers.adapt(weights, gradients, first, second, scales.contiguous(), rows, *settings)
    return [t for part in made for t in part]


def _adam_reference(
    scales: Tensor, active: Tensor | None, decay: float, beta1: float, beta2: float, eps: float, count: int,
    tensors: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    made: tuple[list[Tensor], ...] = ([], [], [])
    for w, g, m, v in zip(*grouped(tensors, count), strict=True):
        own = scales.movedim(-1, 0)
        own = own.reshape(*own.shape, *[1] * (w.ndim - own.ndim + 1))
        on = None if active is None else per_client(active, w)
        step = ops.Operations().adam_step([w], [g], [m], [v], own, on, decay, beta1, beta2, eps)
        for part, new in zip(made, step, strict=True):
            part += new
    return [t for part in made for t in part]


def alike(tensors: list[Tensor], count: int) -> bool:
    """Whether weights, gradients and the rest lie in memory without gaps and in the same order, such as channels
    last, so that the step need not know it."""
    rows = zip(*(part for part in grouped(tensors, count) if part), strict=True)
    return all(
        torch.ops.aten.is_non_overlapping_and_dense(w) and all(t.stride() == w.stride() for t in rest)
        for w, *rest in rows
    )


def grouped(tensors: list[Tensor], count: int) -> list[list[Tensor]]:
    """Weights, gradients, and velocities or moments. Velocities may be empty."""
    parts = [tensors[start : start + count] for start in range(0, len(tensors), count)]
    return parts if len(parts) > 2 else [*parts, []]


def per_client(active: Tensor, t: Tensor) -> Tensor:
    """active (c,) with as many axes as t (c, ...)."""
    return active.view(*active.shape, *[1] * (t.ndim - active.ndim))


def _vmap(
    leading: int, function: Any, info: Any, dims: tuple[Any, ...], rate: Tensor, active: Tensor | None, *inputs: Any
) -> tuple[Any, Any]:
    """Before the first vmap there is no client axis: the step is elementwise. rate: also the scales of Adam."""
    if rate.ndim or dims[0] is not None:
        rate = in_front(rate, dims[0], info.batch_size)
    each = None if active is None else in_front(active, dims[1], info.batch_size)
    scalars, tensors = inputs[: leading - 2], inputs[leading - 2 :]
    rows = (in_front(t, dim, info.batch_size) for t, dim in zip(tensors, dims[leading:], strict=True))
    outputs = function(rate, each, *scalars, *rows)
    return outputs, type(outputs)([0] * len(outputs))


sgd_step = Operation("sgd_step", _kernel, _reference, vmap=partial(_vmap, LEADING), leading=LEADING)
adam_step = Operation(
    "adam_step", _adam_kernel, _adam_reference, vmap=partial(_vmap, ADAM_LEADING), leading=ADAM_LEADING
)
