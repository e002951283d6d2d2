"""On a GPU work goes on as if all were well. Whether it was is asked when everybody waits for the GPU anyway.

Whoever goes on like this does the work again, without hope, where a condition did not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_conditions: ContextVar[list[Tensor] | None] = ContextVar("conditions", default=None)


@contextmanager
def collected() -> Iterator[list[Tensor]]:
    """All that is hoped for meanwhile."""
    conditions: list[Tensor] = []
    token = _conditions.set(conditions)
    try:
        yield conditions
    finally:
        _conditions.reset(token)


def allowed() -> bool:
    return _conditions.get() is not None


def that(condition: Tensor) -> None:
    """condition: (), on the device; it is read when the round ends."""
    conditions = _conditions.get()
    if conditions is None:
        raise ValueError("nobody would do the work again")
    conditions.append(condition)
