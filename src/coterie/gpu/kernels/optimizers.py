"""The SGD and Adam steps."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a program
TOGETHER = 16  # tensors of a launch


def descend(
    weights: list[Tensor],
    slopes: list[Tensor],
    velocities: list[Tensor],
    rate: Tensor,
    active: Tensor | None,
    lr: float,
    decay: float,
    momentum: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after an SGD step and, with momentum, their velocities. velocities: empty for zero.

    rate (): factor on lr, or (c,) for each client. active (c,): which clients take the step. With either, all tensors
    have the client axis c in front.
    """
    moved = [torch.empty_like(t) for t in slopes]
    speeds = [torch.empty_like(t) for t in slopes] if momentum else []
    for start in range(0, len(slopes), TOGETHER):
        tensors = [tuple(kind[start : start + TOGETHER]) for kind in (weights, slopes, velocities, moved, speeds)]
        counts = tuple(t.numel() for t in tensors[1])
        _descend[(sum(triton.cdiv(count, TILE) for count in counts),)](
            *tensors, counts, rate, rate if active is None else active.view(torch.uint8),
            1 if active is None else active.numel(), rate.numel(), lr, decay, momentum, bool(velocities),
            active is not None, rate.ndim > 0, TILE,
        )  # fmt: skip
    return moved, speeds


@triton.jit(do_not_specialize=["rows", "rates"])
def _descend(
    weights, slopes, velocities, moved, speeds, counts, rate, active, rows, rates,
    LR: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr,
    HAS_VELOCITY: tl.constexpr, MASKED: tl.constexpr, PACED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The blocks of all tensors in one grid; a program finds the tensor that its block belongs to."""
    block, lr = tl.program_id(0), LR * tl.load(rate)
    first = 0
    for i in tl.static_range(len(slopes)):
        blocks = tl.cdiv(counts[i], SIZE)
        if (block >= first) & (block < first + blocks):
            at = (block - first).to(tl.int64) * SIZE + tl.arange(0, SIZE)
            inside = at < counts[i]
            w = tl.load(weights[i] + at, mask=inside)
            before = tl.zeros_like(w)
            if HAS_VELOCITY:
                before = tl.load(velocities[i] + at, mask=inside)
            v = tl.load(slopes[i] + at, mask=inside) + DECAY * w + MOMENTUM * before
            if PACED:  # noqa: SIM108
                after = w - LR * tl.load(rate + at // (counts[i] // rates), mask=inside) * v
            else:
                after = w - lr * v
            if MASKED:
                on = tl.load(active + at // (counts[i] // rows), mask=inside, other=0) != 0
                after, v = tl.where(on, after, w), tl.where(on, v, before)
            if MOMENTUM != 0:
                tl.store(speeds[i] + at, v, mask=inside)
            tl.store(moved[i] + at, after, mask=inside)
        first += blocks


def adapt(
    weights: list[Tensor],
    slopes: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    scales: Tensor,
    active: Tensor | None,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, first and second moments after a step of Adam.

    scales (3,), or (c, 3) for each client: learning rate, spread, and the factor on the weights. active (c,): which
    clients take the step. With a client axis c, all tensors have it in front.
    """
    moved, means, squares = ([torch.empty_like(t) for t in slopes] for _ in range(3))
    for start in range(0, len(slopes), TOGETHER):
        parts = (weights, slopes, firsts, seconds, moved, means, squares)
        tensors = [tuple(part[start : start + TOGETHER]) for part in parts]
        counts = tuple(t.numel() for t in tensors[1])
        _adapt[(sum(triton.cdiv(count, TILE) for count in counts),)](
            *tensors, counts, scales, scales if active is None else active.view(torch.uint8), scales.numel() // 3,
            decay, beta1, beta2, eps, active is not None, TILE,
        )  # fmt: skip
    return moved, means, squares


@triton.jit(do_not_specialize=["rows"])
def _adapt(
    weights, slopes, firsts, seconds, moved, means, squares, counts, scales, active, rows,
    DECAY: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, MASKED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The blocks of all tensors in one grid, as in `_descend`."""
    block = tl.program_id(0)
    first = 0
    for i in tl.static_range(len(slopes)):
        blocks = tl.cdiv(counts[i], SIZE)
        if (block >= first) & (block < first + blocks):
            at = (block - first).to(tl.int64) * SIZE + tl.arange(0, SIZE)
            inside = at < counts[i]
            client = at // (counts[i] // rows)
            w = tl.load(weights[i] + at, mask=inside)
            m = tl.load(firsts[i] + at, mask=inside)
            v = tl.load(seconds[i] + at, mask=inside)
            g = tl.load(slopes[i] + at, mask=inside) + DECAY * w
            mean = m + (1 - BETA1) * (g - m)
            square = BETA2 * v + (1 - BETA2) * g * g
            rate = tl.load(scales + 3 * client, mask=inside)
            spread = tl.load(scales + 3 * client + 1, mask=inside, other=1)
            shrink = tl.load(scales + 3 * client + 2, mask=inside)
            after = shrink * w - rate * mean / (tl.sqrt(square) / spread + EPS)
            if MASKED:
                on = tl.load(active + client, mask=inside, other=0) != 0
                after, mean, square = tl.where(on, after, w), tl.where(on, mean, m), tl.where(on, square, v)
            tl.store(means[i] + at, mean, mask=inside)
            tl.store(squares[i] + at, square, mask=inside)
            tl.store(moved[i] + at, after, mask=inside)
        first += blocks
