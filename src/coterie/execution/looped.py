"""Clients one after the other, in this process or in a process pool. Fast on a CPU, and easy to debug.

Each process uses one thread: threads that compete for a core spend most of their time waiting for each other.
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

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError, out_of_memory
from coterie.core.importing import workers_can_import
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.rehearsal import rehearse
from coterie.core.user_code import failure, users_lines
from coterie.execution.backend import LocalBackend, rehearsal_samples
from coterie.execution.process import one_thread
from coterie.execution.requests import Cohort, Request, act, consecutive, keys_for
from coterie.execution.scoring import slices

COHORT = 1024  # clients whose states are loaded at a time, at most
COHORT_BYTES = 2**28  # and the bytes of their states
PR_SET_PDEATHSIG = 1  # Linux: prctl option
DIED = "a worker process died (out of memory?); try fewer with --processes, or --processes 1 to debug"
SHARES = 16  # parts of the work per process: enough to balance the load


class Looped(LocalBackend):
    """Clients one after the other."""

    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        processes: int | None = None,  # None: one per core, on a CPU
        state_dir: str | None = None,
    ) -> None:
        super().__init__(method, model, data, seed, device, state_dir)
        self.runner = ClientRunner(method, self.model, data, seed)
        self.pool: ProcessPoolExecutor | None = None
        count = processes or (cores() if self.device.type == "cpu" else 1)
        self.processes = min(count, data.num_clients)
        if self.processes > 1 and self.device.type != "cpu":
            raise CoterieError("processes must be 1 on a GPU; several work on a CPU only. Or use backend=stacked")
        if self.device.type == "cpu":
            one_thread()
        if self.processes > 1:
            self.pool = start_pool(self.processes, self.runner)

    def rehearse(self) -> None:
        """In a worker process if there are any: after a backward pass, a process that has CUDA must not fork."""
        if self.pool is None:
            super().rehearse()
        else:
            self.pool.submit(rehearse_in_worker).result()

    @property
    def limit(self) -> int:
        """As many clients as their states allow; the processes share the work of a cohort."""
        return max(min(COHORT, COHORT_BYTES // max(self.burden, 1)), self.processes)

    def cohorts(self, request: Request, clients: Tensor) -> list[Cohort]:
        return consecutive(clients, self.limit, self.device)

    def compute(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        ids = cohort.clients.tolist()
        if self.pool is None:
            return self.runner.compute(request, ids, states, downs)
        try:
            shares = [
                (
                    rows,
                    self.pool.submit(in_worker, packed((request, *tree.pick((cohort.clients, states, downs), rows)))),
                )
                for rows in shares_of(ids, self.data.train.sizes, self.processes)
            ]
            parts = [unpacked(future.result()) for _, future in shares]
        except BrokenProcessPool:
            self.kill()  # the remaining workers ignore the signal by which the pool ends them
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
        for worker in list((self.pool._processes or {}).values()) if self.pool else ():  # None after shutdown
            worker.kill()
        answers: Any = self.pool and self.pool._result_queue
        if answers:
            answers._writer.close()  # otherwise the pool waits for the rest of a partial answer


def shares_of(clients: list[int], sizes: tuple[int, ...], workers: int) -> list[Tensor]:
    """Rows of these clients in parts, the largest first; an idle worker takes the next part."""
    rows = torch.tensor([sizes[i] for i in clients]).argsort(descending=True, stable=True)
    return [rows[part] for part in slices(len(rows), -(-len(rows) // (SHARES * workers)))]


class ClientRunner:
    """Computes requests for one client at a time, in any process."""

    def __init__(self, method: AnyMethod, model: Model, data: FederatedData, seed: int) -> None:
        self.method, self.model, self.data, self.seed = method, model, data, seed
        self.samples: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def compute(self, request: Request, clients: list[int], states: Any, downs: Any) -> Any:
        """Compute each client with its row of states and downs, and stack the results."""
        given = (states, downs, keys_for(request, self.seed, torch.tensor(clients)))
        results = [self.work(request, client, *tree.pick(given, row)) for row, client in enumerate(clients)]
        return tree.join([tree.apply(lambda t: t[None], result) for result in results])

    def work(self, request: Request, client: int, state: Any, down: Any, key: Tensor) -> Any:
        """Compute one client; errors name the client, the task and the round."""
        try:
            return self._work(request, client, state, down, key)
        except CoterieError:
            raise
        except Exception as error:
            turn = f", round {request.turn.round}" if request.turn.round >= 0 else ""
            if users_lines(error) and not out_of_memory(error):
                raise failure(
                    f"{self.method.title} failed for client {client} in {request.action}{turn}", error
                ) from error
            error.add_note(f"This happened to client {client} in {request.action}{turn}.")
            raise

    def _work(self, request: Request, client: int, state: Any, down: Any, key: Tensor) -> Any:
        x, y = self._samples(request.split, client)
        if not request.action.startswith("score"):  # for dropout and other layers that draw random numbers
            draws = torch.default_generator if x.device.type == "cpu" else torch
            draws.manual_seed(random.derive(int(key), random.DROPOUT))
        rate = torch.tensor(request.turn.rate, dtype=self.model.mean.dtype, device=x.device)
        data = Data(
            x, y, key.to(x.device), rate, self.data.classes, self.data.transform, alone=True, draws=self.model.hashed
        )
        return act(self.method, self.model, request, data, state, down)

    def _samples(self, split: str, client: int) -> tuple[Tensor, Tensor]:
        if (split, client) not in self.samples:
            part: Split = getattr(self.data, split)
            x, y = part.client(client)
            self.samples[split, client] = channels_last(x.to(self.model.mean.device)), y.to(self.model.mean.device)
        return self.samples[split, client]


def channels_last(x: Tensor) -> Tensor:
    """Images in channels-last memory format, which is fastest for convolutions; batches drawn from them keep it."""
    return x.movedim(1, 3).clone(memory_format=torch.contiguous_format).movedim(3, 1) if x.ndim == 4 else x


# Worker processes. Each has one ClientRunner; tasks and results are transferred as arrays.

_runner: ClientRunner | None = None


class Repeated(NamedTuple):
    """A tensor whose rows are all equal to this one."""

    row: Any
    times: int


class Packed(NamedTuple):
    """A tree whose tensors are stored as arrays, which pickle faster than tensors."""

    content: Any


def packed(given: Any) -> Packed:
    if isinstance(given, Tensor):
        alike = tree.alike(given)
        array = (given[0] if alike else given).detach().cpu().contiguous().numpy()
        return Packed(Repeated(array, len(given)) if alike else array)
    if isinstance(given, dict):
        return Packed({k: packed(v) for k, v in given.items()})
    if isinstance(given, tuple):
        return Packed((type(given), [packed(v) for v in given]))
    return Packed([given])


def unpacked(parcel: Packed) -> Any:
    match parcel.content:
        case Repeated(row, times):
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
    """A writable copy of an array in shared memory."""
    return array if array.flags.writeable else array.copy()


def in_worker(parcel: Packed) -> Packed:
    assert _runner is not None, "the worker process was not set up"
    request, clients, states, downs = unpacked(parcel)
    return packed(_runner.compute(request, clients.tolist(), states, downs))


def rehearse_in_worker() -> None:
    assert _runner is not None, "the worker process was not set up"
    rehearse(_runner.method, _runner.model.to("cpu"), *rehearsal_samples(_runner.data))


def start_pool(count: int, runner: ClientRunner) -> ProcessPoolExecutor:
    # Forked workers share the runner without a copy, and models defined in a script or notebook work.
    kind = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(count, multiprocessing.get_context(kind), initializer=start_worker, initargs=(runner,))
    try:
        with workers_can_import():
            for ready in [pool.submit(os.getpid) for _ in range(count)]:
                ready.result()
    except BrokenProcessPool:
        raise CoterieError(DIED) from None
    return pool


def start_worker(runner: ClientRunner) -> None:
    global _runner
    _runner = runner
    one_thread()
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):  # sent to the group; the main process handles them
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """End this process when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_sharing = 1  # runs that train at the same time


def share_cores(trainings: int) -> None:
    """Share the cores among n runs, of which this process is one."""
    global _sharing
    _sharing = trainings


def cores() -> int:
    """Cores that a run of this process may use."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // _sharing, 1)
