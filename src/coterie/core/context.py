"""Values that hold inside a block, in the thread that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Set a context variable inside this block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
