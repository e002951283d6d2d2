"""Which weighted sum a method's server takes, told by the method's own code.

In the place of weights a server function is given rows of an identity matrix, a column for each model that there is.
If all that it does with models is to add up multiples of them, what comes out are the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError

Axes = tuple[int, ...]  # leading axes of weights: none, or (R,) where there is a row for each of several


class Place(NamedTuple):
    """A field that holds weights."""

    structure: Any  # a tree with the names of its tensors, whatever they are
    axes: Axes


def columns(places: Mapping[str, Place]) -> int:
    return sum(math.prod(place.axes) for place in places.values())


def stand_in(message: Any, places: Mapping[str, Place], start: int, total: int) -> Any:
    """The named tuple with rows of the identity (total, total) as its weights, from row `start` on."""
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
    """(C,) or (R, C), from weights that were computed with stand-ins."""
    first, *others = tree.leaves(weights)
    if not all(t.shape == first.shape and torch.equal(t, first) for t in others):
        raise CoterieError("the tensors of one model are combined with different weights")
    return first
