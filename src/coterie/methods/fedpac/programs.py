"""The quadratic programs of all clients, built from one Gram matrix, and residuals of their solutions.

Client i minimizes aᵀ M a over a >= 0, sum a = 1, with M = diag(v) + D_i and D_i[j, l] = <h_j - h_i, h_l - h_i>. With
x_j = (sqrt(v_j) e_j, h_j - h_i) and p = sum_j a_j x_j, the minimum is the shortest p. It is reached when no x_j lies
behind p: (M a)_j = <p, x_j> >= |p|² for all j. The residual is the violation of this condition, as a cosine:

    max_j (|p|² - <p, x_j>) / (|p| |x_j|)

It is dimensionless, so one tolerance fits features of any scale, and a client with huge features does not mask others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Index = NDArray[np.intp]

FLOOR = 1e-11  # smallest variance, relative to |h|²: makes the solution unique; equal clients get equal weights
NOISE = 2e-15  # typical rounding error of values from the Gram matrix, relative to the |h| |h| in them


class Scaled(NamedTuple):
    """The programs of S clients, on the device of their Gram matrix. The unit does not change the weights."""

    unit: Tensor  # () scale of |h|^2 and all fields below
    gram: Tensor  # (S, S) <h_j, h_l>
    v: Tensor  # (S,)
    size: Tensor  # (S,) |h_j|
    lengths: Tensor  # (S, S) |x_j| in program i
    cross: Tensor  # (S, S): D_i[j, l] = gram[j, l] - cross[i, j] - cross[i, l]
    diagonal: Tensor  # (S, S): v_j in program i, lifted so that no rounding error makes M singular


class Programs(NamedTuple):
    """The same as numpy arrays; h stays on its device."""

    h: Tensor  # (S, K*d), one of the clients is 0
    unit: Array
    gram: Array
    v: Array
    size: Array
    lengths: Array
    cross: Array
    diagonal: Array


def build_programs(moments: Tensor, variances: Tensor) -> Programs:
    h, gram, v = gram_matrix(moments, variances)
    packed = torch.cat([gram, v[:, None]], 1).cpu()  # the only transfer and synchronization of most calls
    gram, v = packed[:, :-1], packed[:, -1]
    check_finite(gram, v)
    return Programs(h, *(t.numpy() for t in scale(gram, v)))


def check_finite(gram: Tensor, v: Tensor) -> None:
    if not (gram.isfinite().all() and v.isfinite().all()):
        raise ValueError("moments and variances must be finite, their squares too")
    if v.min() < 0:
        raise ValueError("variances must not be negative")


def gram_matrix(moments: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h (S, K d) relative to one client, its Gram matrix (S, S), and v (S,)."""
    h = moments.detach().flatten(1).to(torch.float64)
    v = variances.detach().to(h.device, torch.float64)
    if v.shape != h.shape[:1] or len(h) == 0:
        raise ValueError(f"one variance for each client: {tuple(v.shape)} for moments {tuple(moments.shape)}")
    apart = (h - h.mean(0)).square().sum(1)
    h = h - h[apart.argsort()[len(h) // 2 :][:1]]  # relative to a typical client; the mean may be far from all
    return h, h @ h.T, v


def scale(gram: Tensor, v: Tensor) -> Scaled:
    unit = torch.maximum(gram.diagonal().max(), v.max())
    unit = torch.where(unit > 0, unit, 1.0)
    gram, v = gram / unit, v / unit
    squares = gram.diagonal()
    total = squares + v
    typical = total.median()
    typical = torch.where(typical > 0, typical, total.mean().clamp_min(1e-30))
    v = torch.maximum(v, FLOOR * torch.maximum(squares, typical))
    distances = (squares[:, None] + squares - 2 * gram).clamp_min(0)
    lift = 2 * NOISE * (squares[:, None] + squares)
    lengths = (v + distances).sqrt()
    return Scaled(unit, gram, v, squares.sqrt(), lengths, gram - 0.5 * squares[:, None], v + lift)


def gradients(programs: Programs, a: Array, rows: Index, fresh: bool = False) -> Array:
    """(B, S): M a = <p, x_j> for the programs of these rows, from the Gram matrix or, if fresh, from the moments."""
    if fresh:
        h = programs.h
        weights, own = (torch.from_numpy(t).to(h.device, non_blocking=True) for t in (a, rows))
        offset = weights @ h - h[own]  # (B, K*d): sum_l a_l h_l - h_i
        along: Array = (offset @ h.T).cpu().numpy() / programs.unit
    else:
        along = product(a, programs.gram) - programs.gram[rows]
    return a * programs.v + along - along[np.arange(len(rows)), rows][:, None]


def rounding_scale(programs: Programs, a: Array, rows: Index) -> Array:
    """(B, S): the scale of the rounding errors of a gradient from the Gram matrix."""
    size = programs.size
    return (size[rows] + product(np.abs(a), size))[:, None] * (size[rows, None] + size)


def residuals(programs: Programs, a: Array, fresh: bool = False) -> Array:
    """(S,): the residuals, as a cosine. If not fresh, an upper bound of the rounding error is added."""
    rows = np.arange(len(a))
    gradient = gradients(programs, a, rows, fresh)
    value = (a * gradient).sum(1, keepdims=True).clip(1e-300)  # |p|^2
    behind = value - gradient
    if not fresh:
        worst = sum(programs.h.shape) * 2.0**-52  # error of a sum of S sums of K*d products
        behind = behind + 2 * worst * rounding_scale(programs, a, rows)
    dual: Array = (behind / (np.sqrt(value) * programs.lengths)).max(1).clip(0)
    primal: Array = np.maximum(np.abs(a.sum(1) - 1), -a.min(1))
    return primal.clip(dual)


def kkt_cosine(programs: Scaled, h: Tensor, a: Tensor) -> Tensor:
    """(S,): the residuals of weights a, from the moments; nan if any input is."""
    along = (a @ h - h) @ h.T / programs.unit
    gradient = a * programs.v + along - along.diagonal()[:, None]
    value = (a * gradient).sum(1, keepdim=True).clamp_min(1e-300)  # |p|^2
    dual = ((value - gradient) / (value.sqrt() * programs.lengths)).amax(1).clamp_min(0)
    primal = torch.maximum((a.sum(1) - 1).abs(), -a.amin(1))
    return torch.maximum(dual, primal)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: with matrices this small, synchronizing threads costs up to ten times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def product(a: Array, b: Array) -> Array:
    """a @ b by torch, because `one_thread` does not limit numpy's threads."""
    result: Array = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    return result


def solution(matrix: Array, right: Array) -> Array:
    result: Array = torch.linalg.solve(torch.from_numpy(matrix), torch.from_numpy(right)).numpy()
    return result
