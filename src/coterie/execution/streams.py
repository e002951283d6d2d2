"""Parallel streams: the plain step of each client's own network, several clients side by side. For deep networks on a
GPU, and for what vmap cannot do.

Each branch has a CUDA stream and memory of its own. What a client computes is recorded there as CUDA graphs when its
number of samples occurs for the first time, and replayed for all clients of that size, with their samples, keys and
weights. Clients wait for no other client and are not padded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, out_of_memory
from coterie.core.method import AnyMethod
from coterie.core.metrics import SummedMetric
from coterie.core.model import Model
from coterie.execution.backend import TOO_LARGE, LocalBackend, check_draws
from coterie.execution.cohorts import largest_cohort, memory
from coterie.execution.device_split import device_splits
from coterie.execution.graphs import Graphs, unrecorded
from coterie.execution.requests import Cohort, Request, act, consecutive, keys_for
from coterie.execution.scoring import measured
from coterie.gpu import devices
from coterie.gpu.operations import fused_on
from coterie.gpu.recording import CudaGraphs

BRANCHES = 5  # clients side by side
RECORDINGS = 1 / 16  # of the GPU's memory, for what the recordings of all branches read and write
RECORDING = 30  # steps that could be replayed while a client is recorded, about
END = object()


class Branch:
    """One stream, its recordings and their memory."""

    def __init__(self, device: torch.device, number: int, room: float) -> None:
        recorder = CudaGraphs(device, 1 + number) if device.type == "cuda" else None
        self.stream = recorder.stream if recorder else None
        self.graphs = Graphs(recorder, room, shared=True)
        self.met: set[Any] = set()  # what was recorded here

    def selected(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()


class Streams(LocalBackend):
    """Clients on parallel branches, each computed as if it were alone."""

    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        branches: int | None = None,
        cohort: int | None = None,  # None: as many as fit
        state_dir: str | None = None,
    ) -> None:
        if not method.stackable:
            raise CoterieError(f"{method.title} branches on values, so it cannot be recorded; use backend=looped")
        super().__init__(method, model, data, seed, device, state_dir)
        check_draws(model)
        self.most, self.samples = cohort, device_splits(data, self.device)
        for split in self.samples.values():
            split.x = channels_last(split.x)
        self._open(branches or BRANCHES)

    def _open(self, count: int) -> None:
        room = RECORDINGS * memory(self.device) / count if self.device.type == "cuda" else 0
        self.branches = [Branch(self.device, number, room) for number in range(count)]

    @property
    def limit(self) -> int:
        return self.most or max(largest_cohort(self.device, self.burden), len(self.branches))

    def cohorts(self, request: Request, clients: Tensor) -> list[Cohort]:
        return consecutive(clients, self.limit, self.device)

    def compute(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        with devices.selected(self.device), fused_on(self.device, channels_last=True):
            held, task = self.samples[request.split], self.model.task
            if request.action == "score_global" and not (self.model.tests_by_client or request.every):
                return held.score_global(self.method, self.model, request.shared, cohort.ids)
            made = self._fitting(request, cohort, states, downs)
            if request.action.startswith("score") and (request.every or not isinstance(task.metric, SummedMetric)):
                rows = zip(made, held.labels(cohort), strict=True)
                made = [measured(task, output, y, request.every) if len(y) else output for output, y in rows]
            return tree.join([tree.apply(lambda t: t[None], row) for row in made])

    def _fitting(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> list[Any]:
        """Compute the cohort, on fewer branches if it does not fit into GPU memory, unrecorded if it cannot be."""
        try:
            return self._run(request, cohort, states, downs)
        except RuntimeError as error:
            if out_of_memory(error):
                if len(self.branches) == 1:
                    raise CoterieError(TOO_LARGE) from None
                self._open(len(self.branches) // 2)
            elif any(branch.graphs.recorder for branch in self.branches):
                plain = unrecorded(error)
                for branch in self.branches:
                    branch.graphs = plain
            else:
                raise
        torch.cuda.empty_cache()
        return self._fitting(request, cohort, states, downs)

    def _run(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> list[Any]:
        """What each client of the cohort computes."""
        held, clients = self.samples[request.split], cohort.clients.tolist()
        made: list[Any] = [None] * len(clients)
        key = keys_for(request, self.seed, cohort.ids)
        rate = torch.full((), request.turn.rate, dtype=self.model.mean.dtype, device=self.device)

        def client(places: Tensor, key: Tensor, rate: Tensor, shared: Any, given: Any) -> Any:
            x, y = held.x[places], held.y[places]
            data = Data(x, y, key, rate, self.data.classes, self.data.transform, draws=self.model.hashed)
            return act(
                self.method, self.model, request._replace(shared=shared), data, *tree.apply(channels_last, given)
            )

        def work(branch: Branch, rows: Sequence[int]) -> Generator[None, None, None]:
            for row in rows:
                given = (held.places(clients[row]), key[row], rate, request.shared, tree.pick((states, downs), row))
                made[row] = yield from branch.graphs.parts(
                    f"{request.action} {request.split} {request.every}", client, given
                )

        shares = self._shares(request, clients)
        with forked(self.branches, self.device):
            running = deque((b, work(b, rows)) for b, rows in zip(self.branches, shares, strict=True))
            while running:
                branch, parts = running.popleft()
                with branch.selected():
                    if next(parts, END) is not END:
                        running.append((branch, parts))
        return made

    def _shares(self, request: Request, clients: Sequence[int]) -> list[list[int]]:
        """Rows for every branch: the largest client first, each where it is done first."""
        train, sizes = self.method.train, self.split(request.split).sizes
        load: list[int] = [0] * len(self.branches)
        shares: list[list[int]] = [[] for _ in self.branches]
        for row in sorted(range(len(clients)), key=lambda row: -sizes[clients[row]]):
            size = sizes[clients[row]]
            steps = -(-size // train.batch_size) * (train.local_epochs if request.action == "train" else 1)
            form = (request.action, request.split, request.every, size)
            done = [old + steps + RECORDING * (form not in b.met) for old, b in zip(load, self.branches, strict=True)]
            first = done.index(min(done))
            load[first] = done[first]
            shares[first].append(row)
            self.branches[first].met.add(form)
        return shares


@contextmanager
def forked(branches: Sequence[Branch], device: torch.device) -> Iterator[None]:
    """Branches begin after all work so far; all work after this block waits for them.

    So memory of one stream may be read by another: it is reused only after the next fork.
    """
    streams = [branch.stream for branch in branches if branch.stream]
    if not streams:
        yield
        return
    here = torch.cuda.current_stream(device)
    for stream in streams:
        stream.wait_stream(here)
    try:
        yield
    finally:
        for stream in streams:
            here.wait_stream(stream)


def channels_last(t: Tensor) -> Tensor:
    """Images and convolution weights in the memory format that is fastest for convolutions."""
    return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t
