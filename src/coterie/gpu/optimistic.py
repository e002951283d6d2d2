"""Optimistic execution: continue now, verify later.

Code that would have to wait for a GPU to check a condition records the condition instead. The conditions are read at
the end of the round, with its one synchronization; if one does not hold, the caller repeats the work with checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from coterie.core.context import holding

_conditions: ContextVar[list[Tensor] | None] = ContextVar("conditions", default=None)


@contextmanager
def collected() -> Iterator[list[Tensor]]:
    """Conditions collected inside this block."""
    conditions: list[Tensor] = []
    with holding(_conditions, conditions):
        yield conditions


def allowed() -> bool:
    """Whether a caller collects conditions, so that work may continue unchecked."""
    return _conditions.get() is not None


def expect(condition: Tensor) -> None:
    """Record a condition (), a boolean on the device; it is read when the round ends."""
    conditions = _conditions.get()
    if conditions is None:
        raise ValueError("optimistic.expect outside of optimistic.collected: no caller would repeat the work")
    conditions.append(condition)
