"""The gradient of a client's loss: by torch.autograd, or by torch.func for clients under vmap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # None outside of vmap and torch.func.grad

from coterie.core.tree import Tree

Objective = Callable[[Tree, Tree], tuple[Tensor, Tree]]  # weights, BatchNorm's statistics -> loss, new statistics


def gradient(f: Objective, weights: Tree, statistics: Tree) -> tuple[Tree, Tree]:
    """Of the loss in the weights; and BatchNorm's new statistics."""
    return (autograd_gradient if peek_interpreter_stack() is None else functional_gradient)(f, weights, statistics)


def autograd_gradient(f: Objective, weights: Tree, statistics: Tree) -> tuple[Tree, Tree]:
    """Faster, but does not work under vmap."""
    with torch.enable_grad():
        leaves = {n: t.detach().requires_grad_() for n, t in weights.items()}
        value, written = f(leaves, statistics)
        return _slopes(value, leaves), written


def functional_gradient(f: Objective, weights: Tree, statistics: Tree) -> tuple[Tree, Tree]:
    """torch.func.grad without a graph of the gradient itself and without importing torch's compiler, which is slow."""
    if _begin is None:
        return torch.func.grad(f, has_aux=True)(weights, statistics)
    level = _begin()
    try:
        with torch.enable_grad():
            leaves = {n: _differentiable(_wrap(t, level)) for n, t in weights.items()}
            value, written = f(leaves, {n: _wrap(t, level) for n, t in statistics.items()})
            slopes = _slopes(value, leaves)
            return {n: _unwrap(t, level) for n, t in slopes.items()}, {n: _unwrap(t, level) for n, t in written.items()}
    finally:
        _end()


def _slopes(value: Tensor, leaves: Tree) -> Tree:
    if not leaves:
        return {}
    if not value.requires_grad:  # the loss does not depend on the weights
        return {n: torch.zeros_like(t) for n, t in leaves.items()}
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()), materialize_grads=True), strict=True))


try:  # torch internals; torch.func.grad is used where they differ
    from torch._C._functorch import _grad_decrement_nesting as _end
    from torch._C._functorch import _grad_increment_nesting as _begin
    from torch._C._functorch import _unwrap_for_grad as _unwrap
    from torch._C._functorch import _wrap_for_grad as _wrap
    from torch._functorch.eager_transforms import _create_differentiable as _differentiable
except ImportError:  # pragma: no cover
    _begin = None  # type: ignore[assignment]
