"""Quadratic programs on the simplex: the head weights of all clients at once.

Client i mixes the heads of all participants with the weights a that minimise its estimated risk

    a^T M a    with  a >= 0, sum a = 1,    M = diag(v) + D_i,    D_i[j, l] = <h_j - h_i, h_l - h_i>

(Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, 2023).
In words: with p = sum_j a_j x_j and x_j = (sqrt(v_j) e_j, h_j - h_i), find the shortest p. Such a p is shortest
when no x_j lies behind it: (M a)_j = <p, x_j> >= |p|^2 for all j. By how much this fails is the residual, a cosine:

    max_j (|p|^2 - <p, x_j>) / (|p| |x_j|)

It has no unit, so one tolerance serves features of every scale, and one client with huge features hides nobody.

Every M is made of entries of one Gram matrix. It is all that leaves the device of the moments, unless its rounding
errors could hide a wrong answer: then gradients are made from the moments themselves. Not even the Gram matrix leaves
a GPU that does not have to be waited for (core/hope.py): there one kernel looks for the answer, and if what it found
is not good enough, all is done again here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core import hope, stacks

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Index = NDArray[np.intp]

AIM = 1e-10  # the solver goes on until the residual is below this
TOLERANCE = 1e-8  # an answer with a larger residual is refused
FLOOR = 1e-11  # smallest variance, relative to |h|^2: makes the answer unique, equal clients share equally
NOISE = 2e-15  # usual rounding error of what is made from the Gram matrix, relative to the |h| |h| in it
FIRST = 1.5  # clients in the sets that the search starts from, times the root of S
GROWTH = 0.25  # share of the largest set that may enter a set at once
LEAPS = 25  # exchanges of many clients at once; 4 to 12 are usual
POLISH = 8  # turns with fresh gradients that aim at AIM; after them TOLERANCE is enough
BLOCK = 2**17  # numbers in one batch of small matrices: 1 MB stays in the cache


class SimplexError(RuntimeError):
    """The programs were not solved to the tolerance."""


def head_weights(moments: Tensor, variances: Tensor) -> Tensor:
    """The weights that combine the heads of S clients, for each of them.

    moments (S, K, d) or (S, K*d): h_i, class share times class mean of the features; variances (S,): v_i >= 0.
    Returns (S, S) float64 on the device of the moments: row i = weights of client i, exact to TOLERANCE.
    Raises ValueError for input that is not finite or negative variances, SimplexError if the check fails.
    """
    if hope.allowed() and stacks.usable(moments.device):
        from coterie.core.kernels.exchange import MOST

        if len(moments) <= MOST:
            return _hoped(moments, variances)
    with _one_thread():
        programs = _programs(moments, variances)
        weights = _exchange(programs)
        residual = _residual(programs, weights)
        if not residual.max() <= TOLERANCE:
            weights = _descend(programs, weights)
            residual = _residual(programs, weights, fresh=True)
    if not residual.max() <= TOLERANCE:
        raise SimplexError(
            f"head weights of client {residual.argmax()}: residual {residual.max():.1e} is above {TOLERANCE:.0e}"
        )
    return torch.from_numpy(weights).to(moments.device, non_blocking=True)


def _hoped(moments: Tensor, variances: Tensor) -> Tensor:
    """The same by one kernel, which nobody waits for: that it is right is hoped."""
    from coterie.core.kernels.exchange import exchange

    h, gram, v = _gram(moments, variances)
    programs = _scaled(gram, v)
    weights = exchange(programs, int(FIRST * len(h) ** 0.5), GROWTH, LEAPS, AIM, NOISE)
    sound = gram.isfinite().all() & v.isfinite().all() & (v >= 0).all()
    hope.that(sound & (_kkt(programs, h, weights) <= TOLERANCE).all())
    return weights


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices here are so small that threads take longer to meet than to compute: ten times, on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _product(a: Array, b: Array) -> Array:
    """By torch, as all products and solutions here: numpy's library knows no such limit."""
    result: Array = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    return result


def _solution(matrix: Array, right: Array) -> Array:
    result: Array = torch.linalg.solve(torch.from_numpy(matrix), torch.from_numpy(right)).numpy()
    return result


def kkt_residual(weights: Tensor, moments: Tensor, variances: Tensor) -> Tensor:
    """(S,): how far row i of the weights is from the minimum of client i, as a cosine; 0 is exact.

    Comes from the definition, not from the solver: the gradient is v a + <sum_l a_l h_l - h_i, h_j - h_i>,
    with variances below FLOOR raised to it as in head_weights.
    Negative weights and sums other than 1 count with their size.
    """
    h, gram, v = _gram(moments, variances)
    _check(gram, v)
    return _kkt(_scaled(gram, v), h, weights.detach().to(h))


def _kkt(programs: Scaled, h: Tensor, a: Tensor) -> Tensor:
    """(S,): nan, if anything is."""
    along = (a @ h - h) @ h.T / programs.unit
    gradient = a * programs.v + along - along.diagonal()[:, None]
    value = (a * gradient).sum(1, keepdim=True).clamp_min(1e-300)  # |p|^2
    dual = ((value - gradient) / (value.sqrt() * programs.lengths)).amax(1).clamp_min(0)
    primal = torch.maximum((a.sum(1) - 1).abs(), -a.amin(1))
    return torch.maximum(dual, primal)


class Scaled(NamedTuple):
    """The programs of S clients, where their Gram matrix is. The unit changes no weights."""

    unit: Tensor  # () of |h|^2 and all that follows
    gram: Tensor  # (S, S) <h_j, h_l>
    v: Tensor  # (S,)
    size: Tensor  # (S,) |h_j|
    lengths: Tensor  # (S, S) |x_j| in program i
    cross: Tensor  # (S, S): D_i[j, l] = gram[j, l] - cross[i, j] - cross[i, l]
    diagonal: Tensor  # (S, S): v_j in program i, lifted so that no rounding error makes M singular


class Programs(NamedTuple):
    """The same on the host, but for h."""

    h: Tensor  # (S, K*d), one of the clients is 0
    unit: Array
    gram: Array
    v: Array
    size: Array
    lengths: Array
    cross: Array
    diagonal: Array


def _programs(moments: Tensor, variances: Tensor) -> Programs:
    h, gram, v = _gram(moments, variances)
    packed = torch.cat([gram, v[:, None]], 1).cpu()  # the only transfer, and synchronisation, of most calls
    gram, v = packed[:, :-1], packed[:, -1]
    _check(gram, v)
    return Programs(h, *(t.numpy() for t in _scaled(gram, v)))


def _check(gram: Tensor, v: Tensor) -> None:
    if not (gram.isfinite().all() and v.isfinite().all()):
        raise ValueError("moments and variances must be finite, their squares too")
    if v.min() < 0:
        raise ValueError("variances must not be negative")


def _gram(moments: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h (S, K*d), its Gram matrix, and v."""
    h = moments.detach().flatten(1).to(torch.float64)
    v = variances.detach().to(h.device, torch.float64)
    if v.shape != h.shape[:1] or len(h) == 0:
        raise ValueError(f"one variance for each client: {tuple(v.shape)} for moments {tuple(moments.shape)}")
    apart = (h - h.mean(0)).square().sum(1)
    h = h - h[apart.argsort()[len(h) // 2 :][:1]]  # an ordinary client is 0: the mean may be far from all of them
    return h, h @ h.T, v


def _scaled(gram: Tensor, v: Tensor) -> Scaled:
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


def _gradient(programs: Programs, a: Array, rows: Index, fresh: bool = False) -> Array:
    """(B, S): M a = <p, x_j> for the programs of these rows, from the Gram matrix or fresh from the moments."""
    if fresh:
        h = programs.h
        weights, own = (torch.from_numpy(t).to(h.device, non_blocking=True) for t in (a, rows))
        offset = weights @ h - h[own]  # (B, K*d): sum_l a_l h_l - h_i
        along: Array = (offset @ h.T).cpu().numpy() / programs.unit
    else:
        along = _product(a, programs.gram) - programs.gram[rows]
    return a * programs.v + along - along[np.arange(len(rows)), rows][:, None]


def _blur(programs: Programs, a: Array, rows: Index) -> Array:
    """(B, S): what rounding errors of a gradient from the Gram matrix are relative to."""
    size = programs.size
    return (size[rows] + _product(np.abs(a), size))[:, None] * (size[rows, None] + size)


def _residual(programs: Programs, a: Array, fresh: bool = False) -> Array:
    """(S,): as a cosine. If not fresh, the most that rounding errors can hide is added."""
    rows = np.arange(len(a))
    gradient = _gradient(programs, a, rows, fresh)
    value = (a * gradient).sum(1, keepdims=True).clip(1e-300)  # |p|^2
    behind = value - gradient
    if not fresh:
        worst = sum(programs.h.shape) * 2.0**-52  # error of a sum of S sums of K*d products
        behind = behind + 2 * worst * _blur(programs, a, rows)
    dual: Array = (behind / (np.sqrt(value) * programs.lengths)).max(1).clip(0)
    primal: Array = np.maximum(np.abs(a.sum(1) - 1), -a.min(1))
    return primal.clip(dual)


def _exchange(programs: Programs) -> Array:
    """Finds which weights are not 0, from the Gram matrix. A row that does not end is left at the client's own head.

    Without a >= 0 the minimum over a set of clients is M^-1 1, scaled to sum 1. Whoever has a negative weight
    leaves the set, those who lie behind p most enter it, all at once, until there are none. Sets may come back;
    then one client at a time changes, the last one, and in exact numbers no set does (Murty 1974).
    """
    clients = len(programs.v)
    own = np.eye(clients, dtype=np.bool_)
    free = _free(programs)
    inside: Mask = free.min(1) > 0  # nobody has to leave: the answer
    weights = np.where(inside[:, None], free, own)
    rows = np.flatnonzero(~inside)
    active = own[rows] | _largest(free[rows], int(FIRST * clients**0.5))
    for turn in range(LEAPS + 5 * clients):
        if len(rows) == 0:
            break
        z = _solve(programs, active, rows, np.ones(active.shape))
        value = 1 / z.sum(1, keepdims=True)  # |p|^2
        a = z * value
        behind = value - _gradient(programs, a, rows)
        behind[active | (behind <= AIM * value + NOISE * _blur(programs, a, rows))] = 0
        most = max(1, int(GROWTH * active.sum(1).max()))
        change = _largest(behind / programs.lengths[rows], most) | (a < 0)
        if turn >= LEAPS:
            change &= change[:, ::-1].cumsum(1)[:, ::-1] == 1  # the last
        going = change.any(1)
        weights[rows[~going]] = a[~going]
        rows, active = rows[going], active[going] ^ change[going]
    return weights


def _free(programs: Programs) -> Array:
    """(S, S): the minima without a >= 0, over all clients. One matrix serves all: on sum a = 1, a^T M a is
    a^T (diag(v) + gram) a - 2 gram_i a, and a constant."""
    gram, v = programs.gram, programs.v
    solved = _solution(gram + np.diag(v), np.column_stack([gram, np.ones(len(v))]))
    free: Array = solved[:, :-1].T
    ones = solved[:, -1]
    return free + np.outer(1 - free.sum(1), ones / ones.sum())


def _largest(values: Array, most: int) -> Mask:
    """(B, S): the `most` largest values of each row, if they are positive."""
    positive = values > 0
    if most >= values.shape[1]:
        return positive
    return positive & (values >= np.partition(values, -most, axis=1)[:, -most, None])


def _descend(programs: Programs, weights: Array) -> Array:
    """Solves on with fresh gradients: slow, but each step goes down from weights >= 0 to weights >= 0.

    Every other turn lets in the one client that lies behind p most. A step to the minimum over a set that would
    leave the simplex ends at its border. At the limit the rows stay as they are, and the caller's check decides.
    """
    weights = weights.copy()
    rows = np.arange(len(weights))
    for turn in range(50 + 5 * len(weights)):
        a = weights[rows]
        gradient = _gradient(programs, a, rows, fresh=True)
        value = (a * gradient).sum(1, keepdims=True).clip(1e-300)
        behind = (value - gradient) / (np.sqrt(value) * programs.lengths[rows])
        aim = AIM if turn < POLISH else TOLERANCE / 2
        going = (behind > aim).any(1)
        if not going.any():
            break
        a, gradient, behind, rows = a[going], gradient[going], behind[going], rows[going]
        active = a > 0
        if turn % 2:
            active |= _largest(np.where(active | (behind <= aim), 0.0, behind), 1)
        z, y = (_solve(programs, active, rows, right) for right in (np.ones(a.shape), gradient))
        weights[rows] = _step(a, z * (y.sum(1) / z.sum(1))[:, None] - y)
    return weights


def _step(a: Array, direction: Array) -> Array:
    """As far along the direction as a >= 0 allows."""
    ratio = np.divide(a, -direction, out=np.full(a.shape, np.inf), where=direction < 0)
    share = ratio.min(1, keepdims=True).clip(None, 1.0)
    moved = np.where(ratio <= share, 0.0, a + share * direction).clip(0)
    moved /= moved.sum(1, keepdims=True)
    return moved


def _solve(programs: Programs, active: Mask, rows: Index, right: Array) -> Array:
    """(B, S): M^-1 right for the programs of these rows, each within its active set (B, S); 0 outside."""
    answer = np.zeros(right.shape)
    counts = active.sum(1)
    order = np.argsort(-counts)  # sets of like size together: little to fill up
    first = 0
    while first < len(order):
        width = int(counts[order[first]])
        part = order[first : first + max(1, BLOCK // width**2)]
        row, client = active[part].nonzero()
        used = np.arange(width) < counts[part, None]  # (B, w)
        index = np.zeros(used.shape, dtype=np.intp)
        index[used] = client  # both run row by row
        blocks = _blocks(programs, rows[part, None], index, used)
        solved = _solution(blocks, right[part[:, None], index][:, :, None])
        answer[part[row], client] = solved[used, 0]
        first += len(part)
    return answer


def _blocks(programs: Programs, own: Index, index: Index, used: Mask) -> Array:
    """(B, w, w): rows and columns `index` (B, w) of the M of client `own` (B, 1); of the identity where not used."""
    cross = programs.cross[own, index]
    blocks = programs.gram.take(index[:, :, None] * len(programs.gram) + index[:, None, :])
    blocks -= cross[:, :, None]
    blocks -= cross[:, None, :]
    blocks *= used[:, :, None] & used[:, None, :]
    places = np.arange(index.shape[1])
    blocks[:, places, places] += np.where(used, programs.diagonal[own, index], 1.0)
    return blocks
