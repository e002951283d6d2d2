"""Stacked clients: one call under vmap trains a whole cohort. Fast on a GPU.

Clients of a cohort are padded to one length; padding changes no result. On CUDA the work of a cohort is recorded as
graphs, which are replayed for all cohorts of the same shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.metrics import SummedMetric
from coterie.core.model import Model
from coterie.execution.backend import LocalBackend
from coterie.execution.cohorts import SPLITS, CohortPartition
from coterie.execution.graphs import Graphs
from coterie.execution.requests import Cohort, Request, act, keys
from coterie.execution.scoring import global_logits, judge, measured, slices
from coterie.gpu import devices, sampling
from coterie.gpu.fusion import fuse
from coterie.gpu.operations import fused_on
from coterie.gpu.recording import CudaGraphs

CPU_COHORT = 32  # clients of a cohort where the memory is not known
GPU_SHARE = 1 / 32  # of its memory, for everything that scales with the models of a cohort
RECORDINGS = 1 / 16  # of its memory, for what recordings read and write
COPIES = 6  # of a model, while a client trains: state before and after, message, update, gradient, momentum
GLOBAL_BATCH = 4096  # samples of one forward pass of the global model
REMEMBERED = 16  # sets of clients whose cohorts are cached


class Stacked(LocalBackend):
    """Clients of a cohort stacked along an axis, under vmap."""

    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        cohort: int | None = None,  # None: as many as fit
        state_dir: str | None = None,
    ) -> None:
        if not method.stackable:
            raise CoterieError(f"{method.title} cannot be stacked; use backend=looped")
        super().__init__(method, model, data, seed, device, state_dir)
        if model.draws:  # from a hidden stream, which stacked clients would share
            raise CoterieError(
                f"a network with dropout cannot be stacked, it draws random numbers in {model.draws}; use "
                "backend=looped, or dropout 0"
            )
        if devices.runs_triton(self.device):
            self.fast = fuse(self.model)
        self.most = cohort
        self.partition = CohortPartition(method, self.model, data)
        held = {name: split for name in SPLITS if (split := getattr(data, name)) is not None}
        self.samples = {name: DeviceSplit(split, self.device) for name, split in held.items()}
        on_gpu = self.device.type == "cuda"
        self.graphs = Graphs(CudaGraphs(self.device), RECORDINGS * memory(self.device)) if on_gpu else Graphs(None)
        self.remembered: dict[Any, list[Cohort]] = {}

    @property
    def limit(self) -> int:
        """Largest number of stacked clients."""
        if self.most is not None:
            return self.most
        if self.device.type != "cuda":
            return CPU_COHORT
        return max(int(GPU_SHARE * memory(self.device) / (COPIES * max(self.burden, 1))), 1)

    def cohorts(self, job: Request, clients: Tensor) -> list[Cohort]:
        about = (job.task == "score_global", job.split, self.limit, clients.numpy().tobytes())
        cohorts = self.remembered.pop(about, None) or self.partition(job, clients, self.limit, self.device)
        self.remembered[about] = cohorts  # ordered by last use
        if len(self.remembered) > REMEMBERED:
            self.remembered.pop(next(iter(self.remembered)))
        return cohorts

    def compute(self, job: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        with devices.selected(self.device), fused_on(self.device):
            if job.task == "score_global" and not (self.model.tests_by_client or job.every):
                return self._score_global(job, cohort)
            made = self._fitting(job, cohort, states, downs)
            if not job.task.startswith("score") or (isinstance(self.model.task.metric, SummedMetric) and not job.every):
                return made
            task, labels = self.fast.task, self.samples[job.split].labels(cohort)
            rows = zip(made, labels, strict=True)
            return torch.stack([measured(task, output[: len(y)], y, job.every) for output, y in rows])

    def _fitting(self, job: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        """Compute the cohort, in halves if it does not fit into GPU memory."""
        count = len(cohort.clients)
        try:
            return self._run(job, cohort, states, downs)
        except torch.cuda.OutOfMemoryError:
            if count == 1:
                raise CoterieError(
                    "out of memory: not even one client fits into the memory of the GPU; try a smaller batch or network"
                ) from None
        self.most = (count + 1) // 2
        self.remembered.clear()
        self.graphs.captured.clear()
        torch.cuda.empty_cache()
        parts = []
        for part in slices(count, self.most):
            half = cohort._replace(clients=cohort.clients[part], ids=cohort.ids[part], rows=cohort.rows[part])
            rows = torch.arange(part.start, part.stop, device=self.device)
            parts.append(self._fitting(job, half, *tree.pick((states, downs), rows)))
        return tree.join(parts)

    def _run(self, job: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        held = self.samples[job.split]
        given, dims, form = lean((states, downs))

        def client(x: Tensor, y: Tensor, real: Any, key: Tensor, rate: Tensor, shared: Any, given: Any) -> Any:
            mask = real if isinstance(real, Tensor) else None
            data = Data(x, y, key, rate, self.data.classes, self.data.transform, mask)
            return act(self.method, self.fast, job._replace(shared=shared), data, *given)

        def body(samples: Tensor, real: Any, key: Tensor, rate: Tensor, shared: Any, given: Any) -> Any:
            together = torch.func.vmap(client, in_dims=(0, 0, 0, 0, None, None, dims))
            return together(sampling.take(held.x, samples), held.y[samples], real, key, rate, shared, given)

        key = keys(self.seed, job.turn, cohort.ids)
        rate = torch.full((), job.turn.rate, dtype=self.model.mean.dtype, device=self.device)
        inputs = (*held.padded(cohort), key, rate, job.shared, given)
        return self.graphs.run(f"{job.task} {job.split} {form}", body, inputs)

    def _score_global(self, job: Request, cohort: Cohort) -> Tensor:
        held, task = self.samples[job.split], self.fast.task
        with torch.no_grad():
            judged = [
                judge(task, global_logits(self.method, self.fast, job.shared, held.x[part]), held.y[part])
                for part in slices(len(held.y), GLOBAL_BATCH)
            ]
        every = torch.cat(judged)  # (N, S + 1)
        counted = every.new_zeros(len(held.ranges), every.shape[1])
        return counted.index_add_(0, held.owners, every)[cohort.ids]


class DeviceSplit:
    """The samples of all clients on the device, and the position of each client's samples."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.x, self.y, self.ranges = split.x.to(device), split.y.to(device), split.ranges()
        self.owners = split.owners().to(device)  # (N,)
        self.sizes = torch.tensor(split.sizes).to(device)  # (m,)
        last = max(len(split.y) - 1, 0)
        self.starts = torch.tensor(split.starts[:-1]).clamp_max(last).to(device)  # (m,)

    def labels(self, cohort: Cohort) -> list[Tensor]:
        """The labels of each client."""
        return [self.y[self.ranges[client]] for client in cohort.clients.tolist()]

    def padded(self, cohort: Cohort) -> tuple[Tensor, Any]:
        """(C, n) positions of the cohort's samples, and which are real, () if all are. Padding repeats a sample."""
        place = torch.arange(cohort.length, device=self.y.device)
        real = place < self.sizes[cohort.ids][:, None]
        places = torch.where(real, place, 0) + self.starts[cohort.ids][:, None]
        return places, real if cohort.ragged else ()


def lean(given: Any) -> tuple[Any, Any, str]:
    """Trees without copies of rows that are equal for all clients, their vmap in_dims, and the in_dims as a string.

    BatchNorm's statistics keep their axis: each client writes into its own.
    """
    shared = {name: tree.alike(t) and not tree.is_statistic(name) for name, t in tree.items(given)}
    dims: dict[str, Any] = {name: None if one else 0 for name, one in shared.items()}
    leaves = {name: t[0] if shared[name] else t for name, t in tree.items(given)}
    form = "".join("1" if one else "m" for one in shared.values())
    return tree.fill(given, leaves), tree.fill(given, dims), form


def memory(gpu: torch.device) -> int:
    """Bytes of GPU memory."""
    return torch.cuda.get_device_properties(gpu).total_memory
