"""FedPAC's head weights: how client i mixes the heads of all participants.

The weights a of client i minimize its estimated risk

    aᵀ M a    with  a >= 0, sum a = 1,    M = diag(v) + D_i,    D_i[j, l] = <h_j - h_i, h_l - h_i>

(Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, 2023).

Only the Gram matrix of h leaves the device of the moments, unless its rounding errors could hide a wrong solution; then
gradients are computed from the moments. Under optimistic execution (gpu/optimistic.py) nothing leaves the GPU: one
kernel solves the programs, and if its solution is not within the tolerance, the round is computed again here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.gpu import devices, optimistic
from coterie.methods.fedpac.active_sets import AIM, FIRST, GROWTH, LEAPS, TOLERANCE, descend, exchange_sets
from coterie.methods.fedpac.programs import (
    NOISE,
    build_programs,
    gram_matrix,
    kkt_cosine,
    one_thread,
    residuals,
    scale,
)


class SimplexError(RuntimeError):
    """The head weights are not within the tolerance."""


def head_weights(moments: Tensor, variances: Tensor) -> Tensor:
    """The weights with which each of S clients combines the heads of all.

    moments (S, K, d) or (S, K d): h_i, class share times class mean of the features. variances (S,): v_i >= 0.
    Returns (S, S) float64 on the device of the moments: row i has the weights of client i, exact to TOLERANCE.
    Raises ValueError for moments or variances that are not finite and for negative variances, SimplexError if the
    solution is not within TOLERANCE.
    """
    if optimistic.allowed() and devices.runs_triton(moments.device):
        from coterie.methods.fedpac.kernel import MAX_CLIENTS

        if len(moments) <= MAX_CLIENTS:
            return optimistic_weights(moments, variances)
    with one_thread():
        programs = build_programs(moments, variances)
        weights = exchange_sets(programs)
        residual = residuals(programs, weights)
        if not residual.max() <= TOLERANCE:
            weights = descend(programs, weights)
            residual = residuals(programs, weights, fresh=True)
    if not residual.max() <= TOLERANCE:
        raise SimplexError(
            f"head weights of client {residual.argmax()}: residual {residual.max():.1e} is above {TOLERANCE:.0e}"
        )
    return torch.from_numpy(weights).to(moments.device, non_blocking=True)


def optimistic_weights(moments: Tensor, variances: Tensor) -> Tensor:
    """The same by one GPU kernel, without waiting for it; verified at the end of the round."""
    from coterie.methods.fedpac.kernel import exchange

    h, gram, v = gram_matrix(moments, variances)
    programs = scale(gram, v)
    weights = exchange(programs, int(FIRST * len(h) ** 0.5), GROWTH, LEAPS, AIM, NOISE)
    sound = gram.isfinite().all() & v.isfinite().all() & (v >= 0).all()
    optimistic.expect(sound & (kkt_cosine(programs, h, weights) <= TOLERANCE).all())
    return weights
