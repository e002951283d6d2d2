"""Clients one after the other, in this process or spread over a few. The fast way on a CPU, and the debugger's.

Each process uses one thread: two threads that share a contended core wait for each other most of the time.
Results do not depend on the number of processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.clients.base import (
    Answers,
    AnyMethod,
    Clients,
    Scores,
    Turn,
    global_logits,
    has_global,
    judge,
    keys,
    scores,
    slices,
)
from coterie.core import order, tree
from coterie.core.errors import CoterieError
from coterie.core.local import TEST_BATCH, Data
from coterie.core.model import Model
from coterie.core.samples import FederatedData, Split


class Looped(Clients):
    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        processes: int | None = None,  # None: one for each core, on a CPU
    ) -> None:
        super().__init__(method, model.to(device), data, seed)
        self.desk = Desk(method, self.model, data, seed)
        self.states: list[Any] = []
        self.pool: ProcessPoolExecutor | None = None
        count = processes or (cores() if torch.device(device).type == "cpu" else 1)
        count = min(count, data.clients)
        if count > 1 and torch.device(device).type != "cpu":
            raise CoterieError("several processes are for the CPU; on a GPU use one, or clients=batched")
        if torch.device(device).type == "cpu":
            one_thread()
        if count > 1:
            self.pool = start_pool(count, self.desk)

    def join(self, welcome: tree.Tree) -> None:
        first = Turn(-1)
        self.states = [
            self.desk.join(i, keys(self.seed, first, torch.tensor(i)), welcome) for i in range(self.data.clients)
        ]

    def train(self, clients: Tensor, downs: Any, turn: Turn) -> Answers:
        results = self._each(Desk.train, clients, downs, turn)
        good = [(i, up) for i, (_, up, finite) in results.items() if finite]
        for i, (state, _, finite) in results.items():
            if finite:
                self.states[i] = state
        left_out = tuple(i for i, (_, _, finite) in results.items() if not finite)
        ups = tree.stack([up for _, up in good]) if good else None
        return Answers(torch.tensor([i for i, _ in good], dtype=torch.int64), ups, left_out)

    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        for i, state in self._each(Desk.finish, clients, downs, turn).items():
            self.states[i] = state

    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        held = self.split(split)
        return scores(clients, torch.stack([*self._each(Desk.score, clients, downs, split).values()]), held)

    def score_global(self, server: Any, split: str) -> Scores | None:
        if not has_global(self.method, self.model, server, self.data):
            return None
        counted = self._map(Desk.score_global, [(i, (server, split)) for i in range(self.data.clients)])
        return scores(torch.arange(self.data.clients), torch.stack([*counted.values()]), self.split(split))

    def state(self, client: int) -> Any:
        return tree.apply(lambda t: t.cpu(), self.states[client])

    def close(self) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def _each(self, work: Callable[..., Any], clients: Tensor, downs: Any, what: Any) -> dict[int, Any]:
        """Client id -> result of `work`, in the order of ids."""
        tasks = [(i, (self.states[i], tree.pick(downs, row), what)) for row, i in enumerate(clients.tolist())]
        return self._map(work, tasks)

    def _map(self, work: Callable[..., Any], tasks: list[tuple[int, tuple[Any, ...]]]) -> dict[int, Any]:
        if self.pool is None:
            return {i: named(work, self.desk, i, *given) for i, given in tasks}
        sizes = self.data.train.sizes
        largest_first = sorted(tasks, key=lambda task: -sizes[task[0]])
        try:
            futures = {i: self.pool.submit(at_desk, work, i, packed(given)) for i, given in largest_first}
            return {i: unpacked(futures[i].result()) for i, _ in tasks}
        except BrokenProcessPool:
            raise CoterieError(
                "a worker process died (out of memory?); try fewer with --processes, or --processes 1 to debug"
            ) from None


class Desk:
    """Where one client at a time does its work, in whatever process."""

    def __init__(self, method: AnyMethod, model: Model, data: FederatedData, seed: int) -> None:
        self.method, self.model, self.data, self.seed = method, model, data, seed
        self.samples: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def join(self, client: int, key: Tensor, welcome: tree.Tree) -> Any:
        return self.method.client_init(self.model, self._data(client, key, 1.0), welcome)

    def train(self, client: int, state: Any, down: Any, turn: Turn) -> tuple[Any, Any, bool]:
        state, up = self.method.client_train(self.model, state, down, self._data_in(client, turn))
        finite = bool(tree.finite(tree.stack([(state, up)]), 1)) if tree.leaves((state, up)) else True
        return state, up, finite

    def finish(self, client: int, state: Any, down: Any, turn: Turn) -> Any:
        return self.method.client_finish(self.model, state, down, self._data_in(client, turn))

    def score(self, client: int, state: Any, down: Any, split: str) -> Tensor:
        return self._tally(client, split, lambda x: self.method.client_predict(self.model, state, down, x))

    def score_global(self, client: int, server: Any, split: str) -> Tensor:
        return self._tally(client, split, lambda x: global_logits(self.method, self.model, server, x))

    def _tally(self, client: int, split: str, predict: Callable[[Tensor], Tensor]) -> Tensor:
        x, y = self._samples(split, client)
        with torch.no_grad():
            judged = [judge(predict(x[part]), y[part]).sum(0).cpu() for part in slices(len(y), TEST_BATCH)]
        return sum(judged, torch.zeros(2, dtype=torch.float64))

    def _data_in(self, client: int, turn: Turn) -> Data:
        key = keys(self.seed, turn, torch.tensor(client))
        torch.manual_seed(int(order.fold(key, order.DROPOUT)))  # for networks that draw numbers of their own
        return self._data(client, key, turn.rate)

    def _data(self, client: int, key: Tensor, rate: float) -> Data:
        x, y = self._samples("train", client)
        factor = torch.tensor(rate, dtype=self.model.mean.dtype, device=x.device)
        return Data(x, y, key.to(x.device), factor, self.data.classes, self.data.transform, alone=True)

    def _samples(self, split: str, client: int) -> tuple[Tensor, Tensor]:
        if (split, client) not in self.samples:
            part: Split = getattr(self.data, split)
            x, y = part.client(client)
            self.samples[split, client] = channels_last(x.to(self.model.mean.device)), y.to(self.model.mean.device)
        return self.samples[split, client]


def channels_last(x: Tensor) -> Tensor:
    """Images in the memory order that convolutions are fastest in; batches drawn from them keep it."""
    return x.movedim(1, 3).clone(memory_format=torch.contiguous_format).movedim(3, 1) if x.ndim == 4 else x


def named(work: Callable[..., Any], desk: Desk, client: int, *given: Any) -> Any:
    """The work of one client; what goes wrong says whose and which."""
    try:
        return work(desk, client, *given)
    except Exception as error:
        turn = next((f", round {g.round}" for g in given if isinstance(g, Turn)), "")
        error.add_note(f"This happened to client {client} in {work.__name__}{turn}.")
        raise


# Worker processes. A desk is set up once in each; tasks and results cross as arrays.

_desk: Desk | None = None


class Packed(NamedTuple):
    """A tree whose tensors stand beside it as arrays, which pickle faster than tensors do."""

    content: Any


def packed(given: Any) -> Packed:
    if isinstance(given, Tensor):
        return Packed(given.detach().cpu().contiguous().numpy())
    if isinstance(given, dict):
        return Packed({k: packed(v) for k, v in given.items()})
    if isinstance(given, tuple):
        return Packed((type(given), [packed(v) for v in given]))
    return Packed([given])


def unpacked(parcel: Packed) -> Any:
    match parcel.content:
        case dict() as branches:
            return {k: unpacked(v) for k, v in branches.items()}
        case (kind, values):
            parts = [unpacked(v) for v in values]
            return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
        case [value]:
            return value
        case array:
            return torch.from_numpy(array)


def at_desk(work: Callable[..., Any], client: int, parcel: Packed) -> Packed:
    assert _desk is not None, "the worker process was not set up"
    return packed(named(work, _desk, client, *unpacked(parcel)))


def start_pool(count: int, desk: Desk) -> ProcessPoolExecutor:
    # Forked workers see the desk without copying it, and models defined in a script or notebook work.
    kind = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(count, multiprocessing.get_context(kind), initializer=sit_down, initargs=(desk,))
    for ready in [pool.submit(os.getpid) for _ in range(count)]:
        ready.result()
    return pool


def sit_down(desk: Desk) -> None:
    global _desk
    _desk = desk
    one_thread()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_thread() -> None:
    """One thread, and an allocator that keeps the memory of activations instead of returning it every step."""
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:  # glibc
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)
