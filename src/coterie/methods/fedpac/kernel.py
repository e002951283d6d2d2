"""`active_sets.exchange_sets` as one kernel. One program per client holds its matrix M.

Clients j run down a tile and clients l across it; its padding to a power of two is in no active set.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from coterie.methods.fedpac.programs import Scaled

SIZES = {32: 4, 64: 8}  # clients of a tile -> warps; for more clients a CPU is faster
MAX_CLIENTS = max(SIZES)


def exchange(programs: Scaled, first: int, growth: float, turns: int, aim: float, noise: float) -> Tensor:
    """Weights (S, S), not verified.

    first: size of the initial sets. growth: share of a set that may enter it at once. turns: the largest number of
    exchanges; a row that has not converged by then is returned as it is.
    """
    clients = len(programs.v)
    weights = programs.v.new_empty(clients, clients)
    size = next(size for size in SIZES if clients <= size)
    _exchange[(clients,)](
        *(t.contiguous() for t in programs[1:]),  # all but the unit
        weights, clients, first, growth, turns, aim, noise, size, num_warps=SIZES[size],
    )  # fmt: skip
    return weights


@triton.jit(do_not_specialize=["clients", "first", "turns"])
def _exchange(
    gram, variances, sizes, lengths, crosses, diagonals, weights,
    clients, first, growth, turns, aim, noise, SIZE: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    j = tl.arange(0, SIZE)
    there = j < clients
    v = tl.load(variances + j, mask=there, other=0.0)
    size = tl.load(sizes + j, mask=there, other=0.0)
    length = tl.load(lengths + own * clients + j, mask=there, other=1.0)
    own_size = tl.load(sizes + own)

    active, a, going, turn = there, v, 1, 0
    while (going > 0) & (turn < turns):
        a = _minimum(gram, crosses, diagonals, active, own, clients, SIZE)
        gradient = _gradient(gram, a, v, own, clients, SIZE)
        value = tl.sum(a * gradient)  # |p|^2
        blur = (own_size + tl.sum(tl.abs(a) * size)) * (own_size + size)
        behind = value - gradient
        outside = there & (active == 0) & (behind > aim * value + noise * blur)
        behind = tl.where(outside, behind / length, 0.0)
        leaving = active & (a < 0)
        if turn == 0:  # all clients are in the set; the minimum, if no weight is negative
            start = (j == own) | _largest(tl.where(there, a, 0.0), first, SIZE)
            change = (start != active) & (tl.max(leaving.to(tl.int32)) > 0)
        else:
            most = (growth * tl.sum(active.to(tl.int32))).to(tl.int32)
            change = leaving | _largest(behind, tl.maximum(most, 1), SIZE)
        going = tl.max(change.to(tl.int32))
        active = active != change
        turn += 1
    tl.store(weights + own * clients + j, a, mask=there)


@triton.jit
def _minimum(gram, crosses, diagonals, active, own, clients, SIZE: tl.constexpr):
    """(SIZE,) M^-1 1, scaled to sum 1, within the active set; 0 outside. By elimination, as M is positive definite."""
    j = tl.arange(0, SIZE)
    down, across = j[:, None], j[None, :]
    cross = tl.load(crosses + own * clients + j, mask=active, other=0.0)
    diagonal = tl.load(diagonals + own * clients + j, mask=active, other=1.0)
    both = active[:, None] & active[None, :]
    m = tl.load(gram + down * clients + across, mask=both, other=0.0)
    m = tl.where(both, m - cross[:, None] - cross[None, :], 0.0) + tl.where(down == across, diagonal[None, :], 0.0)
    right = tl.where(active, 1.0, 0.0).to(tl.float64)
    for k in range(clients):
        row = tl.sum(tl.where(down == k, m, 0.0), 0)
        column = tl.sum(tl.where(across == k, m, 0.0), 1)
        pivot = tl.sum(tl.where(j == k, row, 0.0))
        factor = tl.where(j == k, 0.0, column / pivot)
        m -= factor[:, None] * row[None, :]
        right -= factor * tl.sum(tl.where(j == k, right, 0.0))
    z = right / tl.sum(tl.where(down == across, m, 0.0), 1)
    return z / tl.sum(z)


@triton.jit
def _gradient(gram, a, v, own, clients, SIZE: tl.constexpr):
    """(SIZE,) M a = <p, x_j>."""
    j = tl.arange(0, SIZE)
    down, across = j[:, None], j[None, :]
    inside = (down < clients) & (across < clients)
    products = tl.load(gram + down * clients + across, mask=inside, other=0.0)
    along = tl.sum(a[:, None] * products, 0) - tl.load(gram + own * clients + j, mask=j < clients, other=0.0)
    return a * v + along - tl.sum(tl.where(j == own, along, 0.0))


@triton.jit
def _largest(values, most, SIZE: tl.constexpr):
    """(SIZE,) mask of the `most` largest values and their ties, if they are positive."""
    larger = tl.sum((values[:, None] > values[None, :]).to(tl.int32), 0)
    return (values > 0) & (larger < most)
