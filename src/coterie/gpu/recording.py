"""Record what clients compute on a GPU as CUDA graphs and replay them. Equal training steps are recorded once.

A training step is some hundred small kernels: launching them one by one takes several times longer than running them,
and recording a thousand steps takes as long as launching them.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from coterie.core import tree
from coterie.core.steps import Steps, folding

C = TypeVar("C")  # any tree
Replay = Callable[[], None]
STRETCH, STEP = 0, 1  # kinds of parts; steps are replayed later, so no stretch may use their memory


class Recorded(NamedTuple):
    parts: list[Replay]  # to be replayed in order
    written: Any  # tensors that every replay writes


class GraphRecorder(ABC):
    """Records a computation as stretches and, between them, steps that are recorded once and repeated.

    Recordings share memory: replay one at a time, and copy what it writes before the next.
    """

    parts: list[Replay]  # of the recording in progress, in order

    def record(self, body: Callable[[], Any]) -> Recorded:
        """Record body() without running it; every replay runs it."""
        self.parts = parts = []
        with self.listening(), folding(self):
            self.begin(STRETCH)
            try:
                written = body()
            except BaseException:
                with suppress(RuntimeError):  # a consequence of the error below
                    self.end()
                raise
            parts.append(self.end())
        return Recorded(parts, written)

    @contextmanager
    def between(self) -> Iterator[None]:
        """End the current stretch; begin another one after the steps recorded or repeated inside this block."""
        self.parts.append(self.end())
        yield
        self.begin(STRETCH)

    def step(self, body: Callable[[], None]) -> Replay:
        """Record one step."""
        self.begin(STEP)
        body()
        return self.end()

    def fold(self, carry: C, work: Iterable[tuple[Callable[[C, Any], C], Steps]]) -> C:
        """`steps.fold`, where the first step of each kind runs inside the stretch and the others are recorded once."""
        recorded, met = dict[Any, RecordedSteps[C]](), set[Any]()
        for step, run in work:
            if run.alone:
                for given in run:
                    carry = step(carry, given)
                continue
            if new := step not in met:  # its first step may change the form of the carry
                if (first := next(iter(run), None)) is None:
                    continue
                carry = tree.apply(Tensor.clone, step(carry, first))
                met.add(step)
                recorded.clear()
            if step not in recorded:
                recorded[step] = RecordedSteps(self, step, carry, run)
            recorded[step].play(run, begun=int(new))
        return carry

    def repeat(self, step: Replay, times: int) -> None:
        self.parts += [step] * times

    @abstractmethod
    def listening(self) -> AbstractContextManager[object]:
        """Everything inside this block can be recorded."""

    @abstractmethod
    def begin(self, kind: int) -> None:
        """Begin a part of this kind, STRETCH or STEP."""

    @abstractmethod
    def end(self) -> Replay:
        """End the part."""


@cache
def stream(gpu: int, branch: int) -> torch.cuda.Stream:
    """One stream per branch for all recordings of a process: each new one keeps 64 MB of workspace for products."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]


class CudaGraphs(GraphRecorder):
    """Records CUDA graphs of one GPU. Recordings of different branches may run at the same time."""

    def __init__(self, device: torch.device, branch: int = 0) -> None:
        self.stream = stream(torch.cuda.current_device() if device.index is None else device.index, branch)
        self.pools = [torch.cuda.graph_pool_handle() for _ in (STRETCH, STEP)]
        self.firsts = [self._first(kind, device) for kind in (STRETCH, STEP)]  # keep the pools alive

    def listening(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def begin(self, kind: int) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # relaxed: Triton may load kernels during capture
        self.graph.capture_begin(pool=self.pools[kind], capture_error_mode="relaxed")

    def end(self) -> Replay:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # no work between two runs
            self.graph.capture_end()
        return self.graph.replay

    def _first(self, kind: int, device: torch.device) -> tuple[Replay, Tensor]:
        with self.listening():
            self.begin(kind)
            made = torch.zeros((), device=device)
            return self.end(), made


class RecordedSteps(Generic[C]):
    """One kind of step, recorded. Carry, input tensors and the position in them have fixed places in memory."""

    def __init__(self, by: GraphRecorder, step: Callable[[C, Any], C], carry: C, run: Steps) -> None:
        self.by, self.step, self.carry = by, step, carry
        self.run: Steps = run.having(tree.apply(Tensor.clone, run.tensors))
        self.place = torch.zeros((), dtype=torch.int64, device=next(iter(run.tensors.values())).device)
        self.full: Replay | None = None
        self.rest: Replay | None = None

    def play(self, run: Steps, begun: int) -> None:
        """Run the steps of a run, without the first `begun` ones."""
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
    """old.copy_(new) for all pairs in one kernel: launching one each takes longer than the copies."""
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


class Unwrapped(NamedTuple):
    tensor: Tensor
    axes: tuple[tuple[int, int], ...]  # level of a vmap, and where the tensor has its axis


def plain(t: Tensor) -> Unwrapped:
    """The tensor inside of vmap's wrappers, with the axes that they hide."""
    axes = []
    while functorch.is_batchedtensor(t):
        axes.append((functorch.maybe_get_level(t), functorch.maybe_get_bdim(t)))
        t = functorch.get_unwrapped(t)
    return Unwrapped(t, tuple(axes))
