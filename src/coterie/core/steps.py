"""Sequences of training steps, which a backend may record and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from torch import Tensor

from coterie.core.context import holding
from coterie.core.tree import Tree

C = TypeVar("C")  # any tree


class Steps(Protocol):
    """Steps on consecutive parts of some tensors: several of one size, and perhaps a last, smaller one."""

    @property
    def alone(self) -> bool: ...  # computed alone, not stacked with other clients

    @property
    def size(self) -> int: ...

    @property
    def full(self) -> int: ...  # steps of this size

    @property
    def rest(self) -> int: ...  # size of the last, smaller step; 0: none

    @property
    def tensors(self) -> Tree: ...

    def having(self, tensors: Tree) -> Any: ...  # the same steps on other tensors

    def __iter__(self) -> Iterator[Any]: ...  # the input of each step

    def at(self, place: Tensor) -> Any: ...  # the input of a full step that begins here

    def last(self) -> Any: ...  # the input of the smaller step


class Replayer(Protocol):
    """Folds steps in its own way, with equal results."""

    def fold(self, carry: C, work: Iterable[tuple[Callable[[C, Any], C], Steps]]) -> C: ...


_replayer: ContextVar[Replayer | None] = ContextVar("replayer", default=None)


def folding(by: Replayer | None) -> AbstractContextManager[Replayer | None]:
    """Let `by` fold the steps inside this block; None: one step after the other."""
    return holding(_replayer, by)


def is_recorded() -> bool:
    """Whether steps may be recorded here, with the shapes of the samples that they are recorded on."""
    return _replayer.get() is not None


def fold(carry: C, work: Iterable[tuple[Callable[[C, Any], C], Steps]]) -> C:
    """carry = step(carry, input) for all steps of all runs in order. work: pairs of a step and a run.

    A step may be recorded, so it may depend on tensor values only. It returns new tensors for parts of the carry, or
    the same ones. All runs of one step have equal shapes.
    """
    if (by := _replayer.get()) is not None:
        return by.fold(carry, work)
    for step, run in work:
        for given in run:
            carry = step(carry, given)
    return carry
