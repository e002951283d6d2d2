"""Quadratic programs on the simplex: the head weights of all clients at once.

Client i mixes the heads of all participants with the weights a that minimise its estimated risk

    a^T (diag(v) + D_i) a    with  a >= 0, sum a = 1,    D_i[j, l] = <h_i - h_j, h_i - h_l>

(Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, 2023).
In words: with p = sum_j a_j x_j and x_j = (sqrt(v_j) e_j, h_j - h_i), find the shortest p. Such a p is shortest
when no x_j lies behind it: <p, x_j> >= |p|^2 for all j. The residual says by how much this fails, as a cosine:

    max_j (|p|^2 - <p, x_j>) / (|p| |x_j|)

It has no unit, so one tolerance serves features of every scale, and one client with huge features hides nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

AIM = 1e-10  # the solver goes on until the residual is below this
TOLERANCE = 1e-8  # an answer with a larger residual is refused
FLOOR = 1e-11  # smallest variance, relative to |h|^2: makes the answer unique, equal clients share equally
NOISE = 2e-15  # rounding error of a gradient made from the Gram matrix, relative to |h_i| |h_j|
ROUNDS = 5  # solve, measure with fresh gradients, solve on from there
BLOCK = 2**18  # numbers in one batch of small matrices: 2 MB stay in the cache


class SimplexError(RuntimeError):
    """The programs were not solved to the tolerance."""


def head_weights(moments: Tensor, variances: Tensor) -> Tensor:
    """The weights that combine the heads of S clients, for each of them.

    moments (S, K, d) or (S, K*d): h_i, class share times class mean of the features; variances (S,): v_i >= 0.
    Returns (S, S) float64 on the device of the moments: row i = weights of client i, exact to TOLERANCE.
    Raises ValueError for input that is not finite or negative variances, SimplexError if the check fails.
    """
    h, v = _normalised(moments, variances)
    gram = (h @ h.T).cpu()
    weights = _solve(gram, h, v)
    worst, client = _residual(weights, h, v, gram).max(0)
    if not float(worst) <= TOLERANCE:
        raise SimplexError(
            f"head weights of client {int(client)}: residual {float(worst):.1e} is above {TOLERANCE:.0e}"
        )
    return weights.to(moments.device)


def kkt_residual(weights: Tensor, moments: Tensor, variances: Tensor) -> Tensor:
    """(S,): how far row i of the weights is from the minimum of client i, as a cosine; 0 is exact.

    Comes from the definition, not from the solver: the gradient is v a + <sum_l a_l h_l - h_i, h_j - h_i>,
    with variances below FLOOR raised to it as in head_weights.
    Negative weights and sums other than 1 count with their size.
    """
    h, v = _normalised(moments, variances)
    return _residual(weights.to("cpu", torch.float64), h, v, (h @ h.T).cpu()).to(moments.device)


def _normalised(moments: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """h (S, K*d) shifted to one of the clients, largest entry 1, and v (S,) in that unit: same weights."""
    h = moments.detach().to(torch.float64).flatten(1)
    v = variances.detach().to(h.device, torch.float64)
    if v.shape != h.shape[:1] or len(h) == 0:
        raise ValueError(f"one variance for each client: {tuple(v.shape)} for moments {tuple(moments.shape)}")
    if not bool(torch.isfinite(h).all() & torch.isfinite(v).all()):
        raise ValueError("moments and variances must be finite")
    if bool((v < 0).any()):
        raise ValueError("variances must not be negative")
    apart = (h - h.mean(0)).square().sum(1)
    h = h - h[apart.argsort()[len(h) // 2]]  # an ordinary client is 0: the mean may be far from all of them
    unit = torch.maximum(h.abs().max(), v.max().sqrt())
    unit = torch.where(unit > 0, unit, 1.0)
    h, v = h / unit, v / unit / unit
    length = h.square().sum(1)
    typical = (length + v).median()
    typical = torch.where(typical > 0, typical, (length + v).mean().clamp_min(1e-30))
    return h, v.clamp_min(FLOOR * typical).maximum(FLOOR * length)


def _gradient(weights: Tensor, h: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of row i: <p, x_j> (S, S) and |p|^2 (S,), both on the CPU. No D_i is formed."""
    a = weights.to(h.device)
    offset = a @ h - h  # (S, K*d): sum_j a_j h_j - h_i
    along = offset @ h.T
    gradient = a * v + along - along.diagonal()[:, None]
    value = (a.square() * v).sum(1) + offset.square().sum(1)
    return gradient.cpu(), value.cpu()


def _lengths(gram: Tensor, v: Tensor) -> Tensor:
    """(S, S): |x_j| in the program of client i."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares - 2 * gram).clamp_min(0)
    return (v.cpu() + distances).sqrt()


def _cosines(gradient: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    return ((value[:, None] - gradient) / (value.sqrt()[:, None] * lengths)).amax(1)


def _residual(weights: Tensor, h: Tensor, v: Tensor, gram: Tensor) -> Tensor:
    dual = _cosines(*_gradient(weights, h, v), _lengths(gram, v))
    primal = (weights.sum(1) - 1).abs().maximum(-weights.amin(1))
    return dual.maximum(primal).clamp_min(0)


def _solve(gram: Tensor, h: Tensor, v: Tensor) -> Tensor:
    """All programs. The active set works on the Gram matrix; where rounding blurs it, fresh gradients go on."""
    matrix = gram + v.cpu().diag()
    lengths = _lengths(gram, v)
    weights = _start(matrix, gram)
    size = matrix.diagonal().sqrt()
    for attempt in range(ROUNDS):
        gradient, value = _gradient(weights, h, v)
        todo = (_cosines(gradient, value, lengths) > AIM).nonzero()[:, 0]
        if len(todo) == 0:
            break
        bar = AIM * value[todo].sqrt()[:, None] * lengths[todo]
        if attempt == 0:
            bar = bar.maximum(NOISE * size[todo, None] * size)
        weights[todo] = _active_set(matrix, weights[todo], gradient[todo], bar)
    return weights


def _start(matrix: Tensor, gram: Tensor) -> Tensor:
    """Where the minimum without a >= 0 is inside the simplex, it is the answer; else the client on its own."""
    own = torch.eye(len(matrix), dtype=matrix.dtype)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        return own
    free = torch.cholesky_solve(gram, factor).T
    ones = torch.cholesky_solve(torch.ones_like(gram[:, :1]), factor)[:, 0]
    free = free + (1 - free.sum(1, keepdim=True)) * ones / ones.sum()
    return torch.where((free > 0).all(1, keepdim=True), free, own)


def _active_set(matrix: Tensor, start: Tensor, slope: Tensor, bar: Tensor) -> Tensor:
    """Primal active set for B programs at once, from a feasible start (B, S) with gradient slope (B, S).

    Inside its active set a row takes Newton steps. A step that would leave the simplex ends at the border and
    drops what became 0. A settled row lets in the weights whose growth lowers the objective most, if by more
    than the bar (B, S); with none left it is done. Each step lowers the objective, so no set comes back; where
    rounding spoils that, the rows stop at the limit and the caller's check decides.
    """
    answer, rows = start.clone(), torch.arange(len(start))
    x, r = start, slope
    active = x > 0
    for _ in range(50 + 5 * x.shape[1]):
        direction = _newton(matrix, active, r)
        waiting = active & (x == 0)
        refused = waiting & (direction <= 0)
        stays = refused.any(1)  # solve again without them
        stuck = stays & (refused == waiting).all(1)  # all descent is below rounding error

        moved, share = _step(x, direction)
        share = share.masked_fill(stays, 0.0)
        x = torch.where(stays[:, None], x, moved)
        active = torch.where(stays[:, None], active & ~refused, x > 0)
        r = r * (1 - share[:, None])  # inside the active set, up to a constant
        settled = share == 1
        r[settled] = slope[settled] + (x[settled] - start[settled]) @ matrix
        enters = _entrants(x, r, bar, active, settled)
        active = active | enters

        answer[rows] = x
        still = ~stuck & ~(settled & ~enters.any(1))
        if not bool(still.any()):
            break
        if not bool(still.all()):
            x, r, active, start, slope, bar, rows = (part[still] for part in (x, r, active, start, slope, bar, rows))
    return answer


def _newton(matrix: Tensor, active: Tensor, r: Tensor) -> Tensor:
    """Direction (B, S) to the minimum over the active set; its entries sum to 0.

    The smallest member of a set is its base: each other weight grows at the base's cost. So the systems hold
    differences from the base, and no rounding error of a huge client falls on the others.
    """
    base = torch.where(active, matrix.diagonal(), torch.inf).argmin(1)
    others = active.scatter(1, base[:, None], False)
    direction = torch.zeros_like(r)
    counts, order = others.sum(1).sort(descending=True)  # sets of like size together: little padding
    first = 0
    while first < len(order) and counts[first] > 0:
        rows = order[first : first + max(1, BLOCK // int(counts[first]) ** 2)]
        index, used = _packed(others[rows], counts[first : first + len(rows)])
        fall = r[rows, base[rows]][:, None] - r[rows[:, None], index]
        step = _solve_blocks(matrix, base[rows, None], index, used, fall)
        direction[rows[:, None].expand_as(index)[used], index[used]] = step[used]
        first += len(rows)
    return direction.scatter(1, base[:, None], -direction.sum(1, keepdim=True))


def _packed(active: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (B, width) of the active weights of each row, filled up with 0, and which of them are used."""
    used = torch.arange(int(counts[0])) < counts[:, None]
    index = torch.zeros(used.shape, dtype=torch.int64)
    index[used] = active.nonzero()[:, 1]  # both run row by row
    return index, used


def _solve_blocks(matrix: Tensor, base: Tensor, index: Tensor, used: Tensor, fall: Tensor) -> Tensor:
    """Of each row, the step (B, width) at which all gradients equal that of the base (B, 1)."""
    cross = matrix[base, index] - 0.5 * matrix[base, base]
    blocks = matrix[index[:, :, None], index[:, None, :]] - cross[:, :, None] - cross[:, None, :]
    blocks = blocks * (used[:, :, None] & used[:, None, :])
    blocks.diagonal(dim1=1, dim2=2).add_((~used).to(blocks.dtype))  # identity where the row has no entry
    factor = torch.linalg.cholesky_ex(blocks).L
    return torch.cholesky_solve((fall * used)[:, :, None], factor)[..., 0]


def _step(x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """As far along the direction as x >= 0 allows: the new x and the share (B,) of the way it went."""
    ratio = torch.where(direction < 0, -x / direction, torch.inf)
    share = ratio.amin(1).clamp_max(1.0)
    x = torch.where(ratio <= share[:, None], 0.0, x + share[:, None] * direction).clamp_min(0)
    return x / x.sum(1, keepdim=True), share


def _entrants(x: Tensor, r: Tensor, bar: Tensor, active: Tensor, settled: Tensor) -> Tensor:
    """(B, S): the weights to let in, at most half as many as the largest active set holds."""
    excess = ((x * r).sum(1, keepdim=True) - r) / bar
    excess = excess.masked_fill(active | ~settled[:, None], 0.0)
    most = max(1, int(active.sum(1).max()) // 2)
    best, index = excess.topk(min(most, x.shape[1]), dim=1)
    return torch.zeros_like(active).scatter_(1, index, best > 1)
