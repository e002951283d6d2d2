"""Clients on the workers of a Ray cluster, on this machine or on many.

A worker has the method, the model and all data, and no state: it receives a cohort with its states and messages, and
returns the results. So a worker that dies is replaced, and its cohort is computed again. On a CPU a worker runs its
clients one after the other, on a GPU it stacks them.

A cluster that is started here is private: all ports are on 127.0.0.1, usage reports and the dashboard are off.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.importing import workers_can_import
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.execution.backend import LocalBackend
from coterie.execution.cohorts import CohortPartition
from coterie.execution.looped import Looped, Packed, cores, packed, shares_of, unpacked
from coterie.execution.process import one_thread
from coterie.execution.requests import Cohort, CohortInput, Request, cohort_of
from coterie.execution.stacked import Stacked

log = logging.getLogger("coterie")

TRIES = 3  # attempts for a cohort whose worker dies
PATIENCE = 120.0  # seconds to wait for a worker to start
KNOCK = 3.0  # seconds to wait for the head node of a cluster
SETTINGS = b"\x04"  # byte 3 of the first frame of an HTTP/2 server, which a Ray head node is
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
NOWHERE = "http://127.0.0.1:9"  # no server listens there
# No usage reports, no worker logs on our output.
SILENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
QUIET = {  # for a cluster on this machine: not reachable from others, no queries to cloud metadata services
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "http_proxy": NOWHERE,
    "https_proxy": NOWHERE,
    "no_proxy": "127.0.0.1,localhost",
}


class Ray(LocalBackend):
    """Clients on the workers of a Ray cluster."""

    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: str = "auto",  # of the workers; auto: GPUs if the cluster has any
        cohort: int | None = None,  # clients stacked on a GPU; None: equally many on each
        workers: int | None = None,  # None: one per GPU, or per core
        address: str | None = None,  # None: start a cluster on this machine
        state_dir: str | None = None,
    ) -> None:
        self.started = start(address, workers)
        self.workers: list[Any] = []
        try:
            self.gpu, there = resources(device)
            here = "cuda" if self.gpu and torch.cuda.is_available() else "cpu"
            super().__init__(method, model, data, seed, here, state_dir)
            if here == "cpu":
                one_thread()  # as for looped clients, so that the server's sums are bitwise equal
            if (workers or 1) > there:
                raise CoterieError(f"{workers} workers requested, but the cluster has {there} GPUs or cores for them")
            self.num_workers = min(workers or there, data.num_clients)
            self.stacked, self.most = self.gpu and method.stackable, cohort
            self.partition = CohortPartition(method, self.model, data)
            self.setup = ray().put((method, model, data, seed))
            self.workers = self._hire(self.num_workers)
        except BaseException:
            self._release()
            raise

    def cohorts(self, request: Request, clients: Tensor) -> list[Cohort]:
        if self.stacked:
            return self.partition(request, clients, self.most or -(-len(clients) // self.num_workers), self.device)
        shares = shares_of(clients.tolist(), self.data.train.sizes, self.num_workers)
        return [cohort_of(clients, rows.sort().values, self.device) for rows in shares]

    def compute(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        return next(self.each(request, [CohortInput(cohort, states, downs)]))[1]

    def each(self, request: Request, inputs: Iterable[CohortInput]) -> Iterator[tuple[CohortInput, Any]]:
        """Give every idle worker the next cohort."""
        again: deque[tuple[CohortInput, int]] = deque()  # with the number of attempts
        to_do, idle = ((one, 1) for one in inputs), list(self.workers)
        running: dict[Any, tuple[Any, CohortInput, int]] = {}
        while True:
            while idle and (waiting := again.popleft() if again else next(to_do, None)):
                given, tried = waiting
                about = (request, given.cohort.clients, tuple(given.cohort[3:]), given.states, given.downs)
                worker = idle.pop()
                running[worker.compute.remote(packed(about))] = worker, given, tried
            if not running:
                return
            (done,), _ = ray().wait(list(running), num_returns=1)
            worker, given, tried = running.pop(done)
            try:
                result = unpacked(ray().get(done))
            except ray().exceptions.RayTaskError as error:  # an error in the client's work
                raise error.cause from None
            except ray().exceptions.RayError:
                whose = ", ".join(map(str, given.cohort.clients.tolist()))
                if tried == TRIES:
                    raise CoterieError(
                        f"{TRIES} workers died one after the other at the {request.action} of client {whose} "
                        "(out of memory?); try fewer with --ray-workers"
                    ) from None
                log.warning("a Ray worker died at the %s of client %s, which is computed again", request.action, whose)
                again.append((given, tried + 1))
                idle += self._replace(worker)
            else:
                idle.append(worker)
                yield given, tree.apply(lambda t: t.to(self.device), result)

    def close(self) -> None:
        super().close()
        self._release()

    def _release(self) -> None:
        if ray().is_initialized():
            for worker in self.workers:
                ray().kill(worker)
            if self.started:
                ray().shutdown()
        self.workers = []

    def _hire(self, count: int) -> list[Any]:
        """Start workers and return those that are ready, perhaps fewer than requested."""
        kind = ray().remote(RayWorker).options(num_cpus=1, num_gpus=int(self.gpu), scheduling_strategy="SPREAD")
        hired = [kind.remote(self.setup, self.gpu, self.stacked) for _ in range(count)]
        ready = {worker.ready.remote(): worker for worker in hired}
        done, late = ray().wait(list(ready), num_returns=count, timeout=PATIENCE)
        why = f"none was ready in {PATIENCE:.0f} seconds"
        for answer in done:
            try:
                ray().get(answer)
            except ray().exceptions.RayError as error:
                why = str(error).strip().splitlines()[-1].strip()
                late.append(answer)
        for answer in late:
            ray().kill(ready.pop(answer))
        if not ready:
            raise CoterieError(f"no worker of the Ray cluster could be started: {why}")
        return list(ready.values())

    def _replace(self, dead: Any) -> list[Any]:
        """Replace a worker that died; returns no worker if none starts and others are left."""
        self.workers.remove(dead)
        try:
            new = self._hire(1)
        except CoterieError:
            if not self.workers:
                raise
            new = []
        self.workers += new
        return new


class RayWorker:
    """Computes cohorts in its own process."""

    def __init__(self, setup: tuple[AnyMethod, Model, FederatedData, int], gpu: bool, stacked: bool) -> None:
        device = "cuda" if gpu else "cpu"
        self.backend: LocalBackend = Stacked(*setup, device) if stacked else Looped(*setup, device, processes=1)

    def ready(self) -> None:
        pass

    def compute(self, parcel: Packed) -> Packed:
        request, clients, about, states, downs = unpacked(parcel)
        device = self.backend.device
        cohort = cohort_of(clients, torch.arange(len(clients)), device, *about)
        return packed(self.backend.compute(request, cohort, *moved((states, downs), device)))


def moved(trees: Any, device: torch.device) -> Any:
    """Move trees to the device without copying rows that are all equal."""
    return tree.apply(lambda t: t[0].to(device).expand(len(t), *t.shape[1:]) if tree.alike(t) else t.to(device), trees)


def ray() -> Any:
    """Import Ray on first use, with the variables that it reads at import."""
    os.environ.update(SILENT)
    try:
        import ray
    except ImportError:
        raise CoterieError("backend=ray needs Ray; install it with: pip install 'coterie[ray]'") from None
    return ray


def start(address: str | None, workers: int | None) -> bool:
    """Connect to a cluster, or start one here; returns whether this process has to stop it."""
    with environment({} if address else QUIET):
        if ray().is_initialized():
            return False
        if address:
            knock(address)
            where: dict[str, Any] = {"address": address}
        else:
            where = {"address": "local", "num_cpus": max(workers or 0, cores()), "_node_ip_address": "127.0.0.1"}
            where["include_dashboard"] = False
        try:
            with workers_can_import():
                ray().init(**where, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CoterieError(f"Ray cannot be used{f' at {address}' if address else ''}: {why}") from None
    return True


def knock(address: str) -> None:
    """Fail early if no cluster answers: Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise CoterieError(f"'{address}' is not an address of a Ray cluster; use HOST:PORT, ray://HOST:PORT or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), KNOCK) as line:
            line.sendall(HELLO)
            is_ray = os.environ.get("RAY_USE_TLS") == "1" or line.recv(9)[3:4] == SETTINGS
    except (OSError, OverflowError) as error:
        raise CoterieError(f"no Ray cluster answers at {address}: {error}") from None
    if not is_ray:
        raise CoterieError(f"the server at {address} is not a Ray cluster")


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside this block, for the processes that start in it."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def resources(device: str) -> tuple[bool, int]:
    """Whether each worker has a GPU, and the largest number of workers."""
    there = ray().cluster_resources()
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    if device not in ("auto", "cpu") and not gpus:
        raise CoterieError(f"device '{device}' cannot be used: the Ray cluster has no GPU")
    gpu = device != "cpu" and gpus > 0
    return gpu, gpus if gpu else cpus
