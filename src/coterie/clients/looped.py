"""Clients one after the other, in this process or spread over a few. The fast way on a CPU, and the debugger's.

Each process uses one thread: two threads that share a contended core wait for each other most of the time.
Results do not depend on the number of processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.clients.base import AnyMethod, Cohort, Job, Resident, act, cohort_of, global_logits, keys, slices, tally
from coterie.core import order, tree
from coterie.core.errors import CoterieError
from coterie.core.local import Data
from coterie.core.model import Model
from coterie.core.samples import FederatedData, Split

COHORT = 1024  # clients whose states are out of the store at a time, at most
COHORT_BYTES = 2**28  # and what these states may take
PR_SET_PDEATHSIG = 1  # of Linux
DIED = "a worker process died (out of memory?); try fewer with --processes, or --processes 1 to debug"
SHARES = 16  # parts of the work for each process: enough that none waits long for the others


class Looped(Resident):
    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        processes: int | None = None,  # None: one for each core, on a CPU
        state_dir: str | None = None,
    ) -> None:
        super().__init__(method, model, data, seed, device, state_dir)
        self.desk = Desk(method, self.model, data, seed)
        self.pool: ProcessPoolExecutor | None = None
        count = processes or (cores() if self.device.type == "cpu" else 1)
        self.processes = min(count, data.clients)
        if self.processes > 1 and self.device.type != "cpu":
            raise CoterieError("several processes are for the CPU; on a GPU use one, or clients=batched")
        if self.device.type == "cpu":
            one_thread()
        if self.processes > 1:
            self.pool = start_pool(self.processes, self.desk)

    def cohorts(self, job: Job, clients: Tensor) -> list[Cohort]:
        """As many as their states allow: the processes share the work of a cohort."""
        most = max(min(COHORT, COHORT_BYTES // max(self.burden, 1)), self.processes)
        rows = torch.arange(len(clients))
        return [cohort_of(clients, rows[part], self.device) for part in slices(len(clients), most)]

    def compute(self, job: Job, cohort: Cohort, states: Any, downs: Any) -> Any:
        ids = cohort.clients.tolist()
        if self.pool is None:
            return self.desk.compute(job, ids, states, downs)
        try:
            shares = [
                (rows, self.pool.submit(at_desk, packed((job, *tree.pick((cohort.clients, states, downs), rows)))))
                for rows in shares_of(ids, self.data.train.sizes, self.processes)
            ]
            parts = [unpacked(future.result()) for _, future in shares]
        except BrokenProcessPool:
            self.kill()  # the others, which the pool asks to end by a signal that they ignore
            raise CoterieError(DIED) from None
        return tree.pick(tree.join(parts), torch.cat([rows for rows, _ in shares]).argsort())

    def close(self) -> None:
        super().close()
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def abandon(self) -> None:
        self.kill()
        self.close()

    def kill(self) -> None:
        for worker in list((self.pool._processes or {}).values()) if self.pool else ():  # None: it is shut down
            worker.kill()
        answers: Any = self.pool and self.pool._result_queue
        if answers:
            answers._writer.close()  # else the pool waits for the rest of one that was cut off


def shares_of(clients: list[int], sizes: tuple[int, ...], workers: int) -> list[Tensor]:
    """Rows of these clients, in parts for workers that take the next one when they are free. The largest first."""
    rows = torch.tensor([sizes[i] for i in clients]).argsort(descending=True, stable=True)
    return [rows[part] for part in slices(len(rows), -(-len(rows) // (SHARES * workers)))]


class Desk:
    """Where one client at a time does its work, in whatever process."""

    def __init__(self, method: AnyMethod, model: Model, data: FederatedData, seed: int) -> None:
        self.method, self.model, self.data, self.seed = method, model, data, seed
        self.samples: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def compute(self, job: Job, clients: list[int], states: Any, downs: Any) -> Any:
        """Each with its row; the results stacked."""
        given = (states, downs, keys(self.seed, job.turn, torch.tensor(clients)))
        results = [self.work(job, client, *tree.pick(given, row)) for row, client in enumerate(clients)]
        return tree.join([tree.apply(lambda t: t[None], result) for result in results])

    def work(self, job: Job, client: int, state: Any, down: Any, key: Tensor) -> Any:
        """What goes wrong says to whom, and in what."""
        try:
            return self._work(job, client, state, down, key)
        except Exception as error:
            turn = f", round {job.turn.round}" if job.turn.round >= 0 else ""
            error.add_note(f"This happened to client {client} in {job.task}{turn}.")
            raise

    def _work(self, job: Job, client: int, state: Any, down: Any, key: Tensor) -> Any:
        method, model = self.method, self.model
        x, y = self._samples(job.split, client)
        if job.task == "score":
            return tally(lambda x: method.client_predict(model, state, down, x), x, y)
        if job.task == "score_global":
            return tally(lambda x: global_logits(method, model, job.told, x), x, y)
        draws = torch.default_generator if x.device.type == "cpu" else torch
        draws.manual_seed(int(order.fold(key, order.DROPOUT)))  # for networks that draw numbers of their own
        rate = torch.tensor(job.turn.rate, dtype=model.mean.dtype, device=x.device)
        data = Data(x, y, key.to(x.device), rate, self.data.classes, self.data.transform, alone=True)
        return act(method, model, job, data, state, down)

    def _samples(self, split: str, client: int) -> tuple[Tensor, Tensor]:
        if (split, client) not in self.samples:
            part: Split = getattr(self.data, split)
            x, y = part.client(client)
            self.samples[split, client] = channels_last(x.to(self.model.mean.device)), y.to(self.model.mean.device)
        return self.samples[split, client]


def channels_last(x: Tensor) -> Tensor:
    """Images in the memory order that convolutions are fastest in; batches drawn from them keep it."""
    return x.movedim(1, 3).clone(memory_format=torch.contiguous_format).movedim(3, 1) if x.ndim == 4 else x


# Worker processes. A desk is set up once in each; tasks and results cross as arrays.

_desk: Desk | None = None


class Alike(NamedTuple):
    """A tensor whose rows are all this one."""

    row: Any
    times: int


class Packed(NamedTuple):
    """A tree whose tensors stand beside it as arrays, which pickle faster than tensors do."""

    content: Any


def packed(given: Any) -> Packed:
    if isinstance(given, Tensor):
        alike = tree.alike(given)
        array = (given[0] if alike else given).detach().cpu().contiguous().numpy()
        return Packed(Alike(array, len(given)) if alike else array)
    if isinstance(given, dict):
        return Packed({k: packed(v) for k, v in given.items()})
    if isinstance(given, tuple):
        return Packed((type(given), [packed(v) for v in given]))
    return Packed([given])


def unpacked(parcel: Packed) -> Any:
    match parcel.content:
        case Alike(row, times):
            return torch.from_numpy(writable(row)).expand(times, *row.shape)
        case dict() as branches:
            return {k: unpacked(v) for k, v in branches.items()}
        case tuple((kind, values)):  # arrays of numpy 2.5 are sequences too
            parts = [unpacked(v) for v in values]
            return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
        case list([value]):
            return value
        case array:
            return torch.from_numpy(writable(array))


def writable(array: Any) -> Any:
    """A copy of what others may read too."""
    return array if array.flags.writeable else array.copy()


def at_desk(parcel: Packed) -> Packed:
    assert _desk is not None, "the worker process was not set up"
    job, clients, states, downs = unpacked(parcel)
    return packed(_desk.compute(job, clients.tolist(), states, downs))


def start_pool(count: int, desk: Desk) -> ProcessPoolExecutor:
    # Forked workers see the desk without copying it, and models defined in a script or notebook work.
    kind = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(count, multiprocessing.get_context(kind), initializer=sit_down, initargs=(desk,))
    try:
        for ready in [pool.submit(os.getpid) for _ in range(count)]:
            ready.result()
    except BrokenProcessPool:
        raise CoterieError(DIED) from None
    return pool


def sit_down(desk: Desk) -> None:
    global _desk
    _desk = desk
    one_thread()
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # for the process that has the round, if sent to all
    end_with_parent()


def end_with_parent() -> None:
    """Nobody is left behind if the process that started this one is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_sharing = 1  # trainings at a time


def share_cores(trainings: int) -> None:
    """With so many trainings, of which this process does one, at a time."""
    global _sharing
    _sharing = trainings


def cores() -> int:
    """Those that a training of this process may use."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // _sharing, 1)


def one_thread() -> None:
    """One thread, and an allocator that keeps the memory of activations instead of returning it every step."""
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:  # glibc
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)
