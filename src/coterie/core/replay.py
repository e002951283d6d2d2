"""Equal steps on a GPU: the kernels of one are recorded as a CUDA graph, and replayed for all that follow.

A step of training is some hundred small kernels. To launch them one by one takes several times as long as to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.core import tree

C = TypeVar("C")  # any tree


class Recorded(NamedTuple):
    replay: Callable[[], None]
    written: Any  # by every replay


class Recorder:
    """Recordings on one GPU. They share memory: one is replayed at a time, and what it writes is copied at once."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.first = self.record(lambda: torch.zeros((), device=device))  # the memory is there as long as this is

    def record(self, body: Callable[[], Any]) -> Recorded:
        """What body() does is not done now, but by every replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")  # kernels may be loaded meanwhile
            try:
                written = body()
            except BaseException:
                with suppress(RuntimeError):  # not the reason, only that there is one
                    graph.capture_end()
                raise
            graph.capture_end()
        return Recorded(graph.replay, written)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(by: Recorder | None) -> Iterator[None]:
    """Steps are recorded by this one meanwhile; None: not at all."""
    token = _recorder.set(by)
    try:
        yield
    finally:
        _recorder.reset(token)


class Step(Protocol):
    """What one step is given, beside the carry."""

    @property
    def alone(self) -> bool: ...  # computed on its own, not side by side with other clients

    @property
    def tensors(self) -> tree.Tree: ...

    def having(self, tensors: tree.Tree) -> Any: ...  # the same with other tensors


S = TypeVar("S", bound=Step)


def fold(step: Callable[[C, S], C], carry: C, given: Iterable[S]) -> C:
    """carry = step(carry, one) for all that is given, one after the other.

    What a step does may depend on tensors only: it may be recorded.
    """
    rest = iter(given)
    first = next(rest, None)
    if first is None:
        return carry
    carry = step(carry, first)  # from here on the carry keeps its form
    by = None if first.alone else _recorder.get()
    if by is not None:
        return replayed(by, step, tree.apply(Tensor.clone, carry), rest)
    for one in rest:
        carry = step(carry, one)
    return carry


def replayed(by: Recorder, step: Callable[[C, S], C], carry: C, given: Iterable[S]) -> C:
    """The same with the carry in one place, which every step reads and writes."""
    recorded: dict[Any, tuple[tree.Tree, Recorded]] = {}  # by the shapes that are given

    def move(one: S) -> None:
        tree.apply(Tensor.copy_, carry, step(carry, one))

    for one in given:
        tensors = one.tensors
        shapes = tuple(t.shape for t in tensors.values())
        if shapes not in recorded:
            held = tree.apply(Tensor.clone, tensors)
            recorded[shapes] = held, by.record(partial(move, one.having(held)))
        held, done = recorded[shapes]
        tree.apply(Tensor.copy_, held, tensors)
        done.replay()
    return carry
