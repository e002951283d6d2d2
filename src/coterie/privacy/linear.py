"""The coefficients of the weighted sums that a method's server computes, found by running its code.

A server function gets rows of an identity matrix instead of weights, with a column for each model. If it is linear in
the models, its output holds the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError

Axes = tuple[int, ...]  # leading axes of weights: (), or (R,) for R models


class WeightField(NamedTuple):
    """A field that holds weights."""

    structure: Any  # a tree with the names of its tensors; their values are not used
    axes: Axes


def columns(places: Mapping[str, WeightField]) -> int:
    return sum(math.prod(place.axes) for place in places.values())


def stand_in(message: Any, places: Mapping[str, WeightField], start: int, total: int) -> Any:
    """The named tuple with rows `start`, ... of the identity (total, total) in place of its weights."""
    changed = {}
    for name, (structure, axes) in places.items():
        where = tree.leaves(structure)[0].device
        rows = torch.zeros(math.prod(axes), total, dtype=torch.float64, device=where)
        rows[:, start : start + len(rows)].fill_diagonal_(1.0)
        start += len(rows)
        shared = rows.view(*axes, total)
        changed[name] = tree.fill(structure, dict.fromkeys(tree.flatten(structure), shared))
    return message._replace(**changed)


def coefficients(weights: Any) -> Tensor:
    """(C,) or (R, C), from weights that were computed from stand-ins."""
    first, *others = tree.leaves(weights)
    if not all(t.shape == first.shape and torch.equal(t, first) for t in others):
        raise CoterieError("the tensors of one model are combined with different weights")
    return first
