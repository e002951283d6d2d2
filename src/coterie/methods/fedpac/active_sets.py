"""Active-set solvers for the quadratic programs: they search which weights of each client are nonzero.

`exchange_sets` is fast and works from the Gram matrix. `descend` is slow and safe, and works from the moments.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.methods.fedpac.programs import NOISE, Array, Index, Programs, gradients, rounding_scale, solution

Mask = NDArray[np.bool_]

AIM = 1e-10  # the solvers stop when the residual is below this
TOLERANCE = 1e-8  # weights with a larger residual are an error
FIRST = 1.5  # clients in the sets that the search starts from, times the root of S
GROWTH = 0.25  # share of the largest set that may enter a set at once
LEAPS = 25  # exchanges of many clients at once; 4 to 12 are typical
POLISH = 8  # turns with fresh gradients that aim at AIM; after them TOLERANCE is enough
BLOCK = 2**17  # numbers per batch of small matrices: 1 MB fits in the cache


def exchange_sets(programs: Programs) -> Array:
    """Find the nonzero weights (S, S) from the Gram matrix. Rows that do not converge keep the client's own head only.

    Without a >= 0 the minimum over a set of clients is M^-1 1, scaled to sum 1. Clients with a negative weight leave
    the set and those that lie furthest behind p enter it, all at once, until no client has to. Sets may repeat; after
    LEAPS turns only the last such client changes, so that in exact arithmetic no set repeats (Murty 1974).
    """
    clients = len(programs.v)
    own = np.eye(clients, dtype=np.bool_)
    free = unconstrained(programs)
    inside: Mask = free.min(1) > 0  # no negative weight: this is the minimum
    weights = np.where(inside[:, None], free, own)
    rows = np.flatnonzero(~inside)
    active = own[rows] | largest(free[rows], int(FIRST * clients**0.5))
    for turn in range(LEAPS + 5 * clients):
        if len(rows) == 0:
            break
        z = solve_sets(programs, active, rows, np.ones(active.shape))
        value = 1 / z.sum(1, keepdims=True)  # |p|^2
        a = z * value
        behind = value - gradients(programs, a, rows)
        behind[active | (behind <= AIM * value + NOISE * rounding_scale(programs, a, rows))] = 0
        most = max(1, int(GROWTH * active.sum(1).max()))
        change = largest(behind / programs.lengths[rows], most) | (a < 0)
        if turn >= LEAPS:
            change &= change[:, ::-1].cumsum(1)[:, ::-1] == 1  # the last one only
        going = change.any(1)
        weights[rows[~going]] = a[~going]
        rows, active = rows[going], active[going] ^ change[going]
    return weights


def unconstrained(programs: Programs) -> Array:
    """(S, S): the minima over all clients without a >= 0.

    One matrix serves all rows: on sum a = 1, aᵀ M a is aᵀ (diag(v) + gram) a - 2 gram_i a and a constant.
    """
    gram, v = programs.gram, programs.v
    solved = solution(gram + np.diag(v), np.column_stack([gram, np.ones(len(v))]))
    free: Array = solved[:, :-1].T
    ones = solved[:, -1]
    return free + np.outer(1 - free.sum(1), ones / ones.sum())


def largest(values: Array, most: int) -> Mask:
    """(B, S): the `most` largest values of each row, if they are positive."""
    positive = values > 0
    if most >= values.shape[1]:
        return positive
    return positive & (values >= np.partition(values, -most, axis=1)[:, -most, None])


def descend(programs: Programs, weights: Array) -> Array:
    """Improve weights (S, S) by gradients from the moments: slow, but every step descends within the simplex.

    Every other turn adds the client that lies furthest behind p. A step to the minimum over a set ends at the border
    of the simplex. Rows that have not converged after the last turn stay as they are; the caller checks residuals.
    """
    weights = weights.copy()
    rows = np.arange(len(weights))
    for turn in range(50 + 5 * len(weights)):
        a = weights[rows]
        gradient = gradients(programs, a, rows, fresh=True)
        value = (a * gradient).sum(1, keepdims=True).clip(1e-300)
        behind = (value - gradient) / (np.sqrt(value) * programs.lengths[rows])
        aim = AIM if turn < POLISH else TOLERANCE / 2
        going = (behind > aim).any(1)
        if not going.any():
            break
        a, gradient, behind, rows = a[going], gradient[going], behind[going], rows[going]
        active = a > 0
        if turn % 2:
            active |= largest(np.where(active | (behind <= aim), 0.0, behind), 1)
        z, y = (solve_sets(programs, active, rows, right) for right in (np.ones(a.shape), gradient))
        weights[rows] = step_to_border(a, z * (y.sum(1) / z.sum(1))[:, None] - y)
    return weights


def step_to_border(a: Array, direction: Array) -> Array:
    """Move a (B, S) along a direction as far as a >= 0 allows, at most its whole length."""
    ratio = np.divide(a, -direction, out=np.full(a.shape, np.inf), where=direction < 0)
    share = ratio.min(1, keepdims=True).clip(None, 1.0)
    moved = np.where(ratio <= share, 0.0, a + share * direction).clip(0)
    moved /= moved.sum(1, keepdims=True)
    return moved


def solve_sets(programs: Programs, active: Mask, rows: Index, right: Array) -> Array:
    """(B, S): M^-1 right for the programs of these rows, each within its active set (B, S); 0 outside."""
    answer = np.zeros(right.shape)
    counts = active.sum(1)
    order = np.argsort(-counts)  # sets of similar size together, to pad little
    first = 0
    while first < len(order):
        width = int(counts[order[first]])
        part = order[first : first + max(1, BLOCK // width**2)]
        row, client = active[part].nonzero()
        used = np.arange(width) < counts[part, None]  # (B, w)
        index = np.zeros(used.shape, dtype=np.intp)
        index[used] = client  # both are in row-major order
        blocks = submatrices(programs, rows[part, None], index, used)
        solved = solution(blocks, right[part[:, None], index][:, :, None])
        answer[part[row], client] = solved[used, 0]
        first += len(part)
    return answer


def submatrices(programs: Programs, own: Index, index: Index, used: Mask) -> Array:
    """(B, w, w): rows and columns `index` (B, w) of M of client `own` (B, 1); rows of the identity where not used."""
    cross = programs.cross[own, index]
    blocks = programs.gram.take(index[:, :, None] * len(programs.gram) + index[:, None, :])
    blocks -= cross[:, :, None]
    blocks -= cross[:, None, :]
    blocks *= used[:, :, None] & used[:, None, :]
    places = np.arange(index.shape[1])
    blocks[:, places, places] += np.where(used, programs.diagonal[own, index], 1.0)
    return blocks
