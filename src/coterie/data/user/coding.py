"""Find labels and categories that clients write differently: they would become different classes or inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coterie.data.user.frames import is_number
from coterie.data.user.reading import Array, Notes

if TYPE_CHECKING:
    from coterie.data.user.pooled import Pooled

SPELLED = "spelled differently on different clients; use one spelling"
CODED = "numbers on some clients and text on others; use the same coding everywhere"


def check_coding(pooled: Pooled, notes: Notes) -> None:
    """Report classes and categories that are written differently on different clients."""
    values = [("the label", pooled.y, pooled.classes)] if pooled.task.one_class else []
    for at, column in enumerate(pooled.columns):
        if column.categories:
            codes = np.nan_to_num(pooled.x[:, at], nan=-1).astype(np.int64)
            values.append((f"column '{column.name}'", codes, column.categories))
    for what, codes, names in values:
        has = np.zeros((len(pooled.clients), len(names)), bool)
        has[pooled.owner[codes >= 0], codes[codes >= 0]] = True
        for problem, first, second in conflicts(has, names):
            where = " and ".join(f"{names[k]!r} on {pooled.clients[np.argmax(has[:, k])]}" for k in (first, second))
            notes.wrong(problem, f"{what}: {where}")


def conflicts(has: Array, names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Problems, each with two names that conflict. has: (m, K) whether a client has a name."""
    spellings = defaultdict[str, list[int]](list)
    for k in np.flatnonzero(has.any(0)).tolist():
        spellings[names[k].strip().casefold()].append(k)
    found = [(SPELLED, same[0], same[1]) for same in spellings.values() if len(same) > 1 and divided(has[:, same])]
    numeric = np.array([is_number(name) for name in names], bool)
    sides = np.stack([(has & numeric).any(1), (has & ~numeric).any(1)], axis=1)
    if sides.any(0).all() and divided(sides):
        first, second = (int(np.flatnonzero(has.any(0) & side)[0]) for side in (numeric, ~numeric))
        found.append((CODED, first, second))
    return found


def divided(has: Array) -> bool:
    """Whether no client has two of these names (m, n); if one has, the difference is intended."""
    return bool((has.sum(1) < 2).all())
