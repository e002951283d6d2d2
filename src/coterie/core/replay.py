"""Equal steps on a GPU: the kernels of one are recorded as a CUDA graph, and replayed for all that follow.

A step of training is some hundred small kernels. To launch them one by one takes several times as long as to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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


class Run(Protocol):
    """Steps on some tensors, each on its own part of them: several of one size, and perhaps a smaller one."""

    @property
    def alone(self) -> bool: ...  # computed on its own, not side by side with other clients

    @property
    def size(self) -> int: ...

    @property
    def full(self) -> int: ...  # steps of this size

    @property
    def rest(self) -> int: ...  # size of one more, smaller step; 0: there is none

    @property
    def tensors(self) -> tree.Tree: ...

    def having(self, tensors: tree.Tree) -> Any: ...  # the same with other tensors

    def __iter__(self) -> Iterator[Any]: ...  # what each step is given

    def at(self, place: Tensor) -> Any: ...  # what a step of this size is given that begins here

    def last(self) -> Any: ...  # what the smaller one is given


def fold(carry: C, work: Iterable[tuple[Callable[[C, Any], C], Run]]) -> C:
    """carry = step(carry, given) for all steps of all runs, one after the other; work: what to do in each run.

    What a step does may depend on tensors only: it may be recorded. It makes parts of the carry anew or leaves them in
    their place. All runs with the same step are of one form.
    """
    by, tapes, met = _recorder.get(), dict[Any, Tape[C]](), set[Any]()
    for step, run in work:
        if by is None or run.alone:
            for given in run:
                carry = step(carry, given)
            continue
        if new := step not in met:  # its first step is done as it is: it may give the carry another form
            if (first := next(iter(run), None)) is None:
                continue
            carry = tree.apply(Tensor.clone, step(carry, first))
            met.add(step)
            tapes.clear()
        if step not in tapes:
            tapes[step] = Tape(by, step, carry, run)
        tapes[step].play(run, begun=int(new))
    return carry


class Tape(Generic[C]):
    """Steps recorded with the carry, the tensors and the place in them where every step finds and leaves them."""

    def __init__(self, by: Recorder, step: Callable[[C, Any], C], carry: C, run: Run) -> None:
        self.by, self.step, self.carry = by, step, carry
        self.run: Run = run.having(tree.apply(Tensor.clone, run.tensors))
        self.place = torch.zeros((), dtype=torch.int64, device=next(iter(run.tensors.values())).device)
        self.full: Recorded | None = None
        self.rest: Recorded | None = None

    def play(self, run: Run, begun: int) -> None:
        """All steps but the first ones."""
        tree.apply(Tensor.copy_, self.run.tensors, run.tensors)
        self.place.fill_(begun * run.size)
        for _ in range(begun, run.full):
            self.full = self.full or self.by.record(self._next)
            self.full.replay()
        if run.rest and begun <= run.full:
            self.rest = self.rest or self.by.record(self._last)
            self.rest.replay()

    def _next(self) -> None:
        self._move(self.run.at(self.place))
        self.place += self.run.size

    def _last(self) -> None:
        self._move(self.run.last())

    def _move(self, given: Any) -> None:
        def write(old: Tensor, new: Tensor) -> Tensor:
            return old if new is old else old.copy_(new)

        tree.apply(write, self.carry, self.step(self.carry, given))
