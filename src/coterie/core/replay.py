"""What clients do on a GPU is recorded as CUDA graphs, and replayed. Of equal steps, one is recorded for all.

A step of training is some hundred small kernels. To launch them one by one takes several times as long as to run them,
and to record a thousand steps takes as long as to launch them.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from coterie.core import tree

C = TypeVar("C")  # any tree
Replay = Callable[[], None]
STRETCH, STEP = 0, 1  # kinds of parts; steps come back, so no stretch may use their memory


class Recorded(NamedTuple):
    replay: Replay
    written: Any  # by every replay


class Recorder(ABC):
    """Records what a computation does: stretches of it, and between them steps, each recorded once and repeated.

    Recordings share memory: one is replayed at a time, and what it writes is copied at once.
    """

    parts: list[Replay]  # of what is being recorded, in their order

    def record(self, body: Callable[[], Any]) -> Recorded:
        """What body() does is not done now, but by every replay."""
        self.parts = parts = []
        with self.listening(), recording(self):
            self.begin(STRETCH)
            try:
                written = body()
            except BaseException:
                with suppress(RuntimeError):  # not the reason, only that there is one
                    self.end()
                raise
            parts.append(self.end())

        def replay() -> None:
            for part in parts:
                part()

        return Recorded(replay, written)

    @contextmanager
    def between(self) -> Iterator[None]:
        """What is being recorded ends here, and goes on behind the steps that are recorded or repeated meanwhile."""
        self.parts.append(self.end())
        yield
        self.begin(STRETCH)

    def step(self, body: Callable[[], None]) -> Replay:
        self.begin(STEP)
        body()
        return self.end()

    def repeat(self, step: Replay, times: int) -> None:
        self.parts += [step] * times

    @abstractmethod
    def listening(self) -> AbstractContextManager[object]: ...

    @abstractmethod
    def begin(self, kind: int) -> None:
        """A part, which is a STRETCH or a STEP."""

    @abstractmethod
    def end(self) -> Replay: ...


@cache
def stream(gpu: int) -> torch.cuda.Stream:
    """For all recordings of a process: each new one would keep 64 MB of workspace for products, for good."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]


class CudaGraphs(Recorder):
    """On one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = stream(torch.cuda.current_device() if device.index is None else device.index)
        self.pools = [torch.cuda.graph_pool_handle() for _ in (STRETCH, STEP)]
        self.firsts = [self._first(kind, device) for kind in (STRETCH, STEP)]  # the pools are there as long as these

    def listening(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def begin(self, kind: int) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # relaxed: kernels may be loaded meanwhile
        self.graph.capture_begin(pool=self.pools[kind], capture_error_mode="relaxed")

    def end(self) -> Replay:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # nothing was done between two runs
            self.graph.capture_end()
        return self.graph.replay

    def _first(self, kind: int, device: torch.device) -> tuple[Replay, Tensor]:
        with self.listening():
            self.begin(kind)
            made = torch.zeros((), device=device)
            return self.end(), made


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
        self.full: Replay | None = None
        self.rest: Replay | None = None

    def play(self, run: Run, begun: int) -> None:
        """All steps but the first ones."""
        tree.apply(Tensor.copy_, self.run.tensors, run.tensors)
        self.place.fill_(begun * run.size)
        with self.by.between():
            if run.full > begun:
                self.full = self.full or self.by.step(self._next)
                self.by.repeat(self.full, run.full - begun)
            if run.rest and begun <= run.full:
                self.rest = self.rest or self.by.step(self._last)
                self.by.repeat(self.rest, 1)

    def _next(self) -> None:
        self._move(self.run.at(self.place))
        self.place += self.run.size

    def _last(self) -> None:
        self._move(self.run.last())

    def _move(self, given: Any) -> None:
        new = dict(tree.items(self.step(self.carry, given)))
        write([(old, new[name]) for name, old in tree.items(self.carry) if old is not new[name]])


def write(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """old = new, for all of them in one kernel: one for each takes longer than what it does."""
    alike: list[tuple[Tensor, Tensor]] = []
    for old, new in pairs:
        to, what = plain(old), plain(new)
        if to.axes == what.axes:
            alike.append((to.tensor, what.tensor))
        else:
            old.copy_(new)
    if alike:
        with torch._C._DisableFuncTorch():
            torch._foreach_copy_([old for old, _ in alike], [new for _, new in alike])


class Plain(NamedTuple):
    tensor: Tensor
    axes: tuple[tuple[int, int], ...]  # level of a vmap, and where the tensor has its axis


def plain(t: Tensor) -> Plain:
    """Without the axes that vmaps hide."""
    axes = []
    while functorch.is_batchedtensor(t):
        axes.append((functorch.maybe_get_level(t), functorch.maybe_get_bdim(t)))
        t = functorch.get_unwrapped(t)
    return Plain(t, tuple(axes))
