"""Client updates as the server sees them: the move of each client from what it was sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.tree import Tree

# Fields of an Up that are not weights. Sizes: sample counts, and effective weights of clients.
SIZES = frozenset({"samples", "effective"})
STATISTICS = frozenset({"prototypes", "moments", "variance", "counts"})  # of features, by class
NOT_NEGATIVE = SIZES | {"counts", "variance"}


def moves(ups: Any, downs: Any) -> dict[str, Tree]:
    """Field -> its tensors (S, ...) by dotted name, minus what was sent where Down has the same name.

    Floating-point tensors only: integers, such as the choice of a cluster, are left out.
    """
    there, found = tree.flatten(downs), dict[str, Tree]()
    for name, t in tree.items(ups):
        if t.is_floating_point():
            part = found.setdefault(name.partition(".")[0], {})
            part[name] = t - there[name] if name in there else t
    return found


def moved(ups: Any, downs: Any, changes: Tree) -> Any:
    """The ups that result from other moves."""
    there = tree.flatten(downs)
    ends = {name: there[name] + t if name in there else t for name, t in changes.items()}
    return tree.fill(ups, tree.flatten(ups) | ends, leaf=None)


def norms(parts: Tree) -> Tensor:
    """(S,) norms over all tensors of a client's row."""
    return torch.stack([t.flatten(1).double().square().sum(1) if t.ndim > 1 else t.double().square()
                        for t in parts.values()]).sum(0).sqrt()  # fmt: skip


def scaled(parts: Tree, factors: Tensor) -> Tree:
    """Each row times its client's factor (S,)."""
    return {name: t * factors.to(t.dtype).view(-1, *[1] * (t.ndim - 1)) for name, t in parts.items()}


def shrink(norm: Tensor, bound: Tensor | float) -> Tensor:
    """The factors, at most 1, that make norms at most the bound."""
    return (bound / norm.clamp_min(1e-300)).clamp_max(1)
