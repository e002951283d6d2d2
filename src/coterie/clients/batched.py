"""Clients side by side: one call trains a whole cohort, stacked along a leading axis. The fast way on a GPU.

Clients of a cohort are padded to one length; padding changes no result. On CUDA what a cohort does is recorded as
graphs, which are replayed for all cohorts of the same shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coterie.clients.base import AnyMethod, Cohort, Job, Resident, act, global_logits, judge, keys, slices, tally
from coterie.clients.cohorts import SPLITS, Cutter
from coterie.clients.graphs import Graphs
from coterie.core import fused, stacks, tree
from coterie.core.errors import CoterieError
from coterie.core.local import Data
from coterie.core.model import Model
from coterie.core.replay import CudaGraphs
from coterie.core.samples import FederatedData, Split

CPU_COHORT = 32  # clients side by side where memory cannot be asked
GPU_SHARE = 1 / 32  # of its memory, for all that is as large as the models of a cohort
RECORDINGS = 1 / 16  # of its memory, for what recordings read and write
COPIES = 6  # of a model, while a client trains: state before and after, message, update, gradient, momentum
GLOBAL_BATCH = 4096  # samples of one forward pass of the global model
REMEMBERED = 16  # sets of clients whose cohorts are remembered


class Batched(Resident):
    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        cohort: int | None = None,  # None: all that fit
        state_dir: str | None = None,
    ) -> None:
        if not method.batched:
            raise CoterieError(f"{method.title} cannot be batched; use clients=looped")
        super().__init__(method, model, data, seed, device, state_dir)
        if has_dropout(self.model):  # it draws from a hidden stream, which clients side by side would share
            raise CoterieError("a network with dropout cannot be batched; use clients=looped, or dropout 0")
        if stacks.usable(self.device):
            self.fast = fused.fuse(self.model)
        self.most = cohort
        self.cutter = Cutter(method, self.model, data)
        held = {name: split for name in SPLITS if (split := getattr(data, name)) is not None}
        self.samples = {name: Samples(split, self.device) for name, split in held.items()}
        on_gpu = self.device.type == "cuda"
        self.graphs = Graphs(CudaGraphs(self.device), RECORDINGS * memory(self.device)) if on_gpu else Graphs(None)
        self.remembered: dict[Any, list[Cohort]] = {}
        self.steps = self.padded = 0  # of all training so far

    @property
    def waste(self) -> float:
        """Share of the steps so far that were padding."""
        return 1 - self.steps / self.padded if self.padded else 0.0

    @property
    def limit(self) -> int:
        """Clients side by side, at most."""
        if self.most is not None:
            return self.most
        if self.device.type != "cuda":
            return CPU_COHORT
        return max(int(GPU_SHARE * memory(self.device) / (COPIES * max(self.burden, 1))), 1)

    def cohorts(self, job: Job, clients: Tensor) -> list[Cohort]:
        about = (job.task == "score_global", job.split, self.limit, clients.numpy().tobytes())
        cohorts = self.remembered.pop(about, None) or self.cutter(job, clients, self.limit, self.device)
        self.remembered[about] = cohorts  # the last one used is the last one
        if len(self.remembered) > REMEMBERED:
            self.remembered.pop(next(iter(self.remembered)))
        return cohorts

    def compute(self, job: Job, cohort: Cohort, states: Any, downs: Any) -> Any:
        if job.task == "train":
            self.steps, self.padded = self.steps + cohort.steps, self.padded + cohort.padded
        with stacks.current(self.device):
            if job.task == "score_global" and not self.model.tests_by_batch:
                return self._score_global(job, cohort)
            return self._fitting(job, cohort, states, downs)

    def _fitting(self, job: Job, cohort: Cohort, states: Any, downs: Any) -> Any:
        """In halves, if the GPU cannot hold the whole."""
        count = len(cohort.clients)
        try:
            return self._run(job, cohort, states, downs)
        except torch.cuda.OutOfMemoryError:
            if count == 1:
                raise CoterieError("not even one client fits into the memory of the GPU") from None
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

    def _run(self, job: Job, cohort: Cohort, states: Any, downs: Any) -> Any:
        held = self.samples[job.split]
        given, dims, form = lean((states, downs))

        def client(x: Tensor, y: Tensor, real: Any, key: Tensor, rate: Tensor, told: Any, given: Any) -> Any:
            mask = real if isinstance(real, Tensor) else None
            data = Data(x, y, key, rate, self.data.classes, self.data.transform, mask)
            return self._one(job._replace(told=told), data, *given)

        def body(samples: Tensor, real: Any, key: Tensor, rate: Tensor, told: Any, given: Any) -> Any:
            together = torch.func.vmap(client, in_dims=(0, 0, 0, 0, None, None, dims))
            return together(fused.take(held.x, samples), held.y[samples], real, key, rate, told, given)

        key = keys(self.seed, job.turn, cohort.ids)
        rate = torch.full((), job.turn.rate, dtype=self.model.mean.dtype, device=self.device)
        inputs = (*held.padded(cohort), key, rate, job.told, given)
        return self.graphs.run(f"{job.task} {job.split} {form}", body, inputs)

    def _one(self, job: Job, data: Data, state: Any, down: Any) -> Any:
        """The work of one client of a cohort."""
        if job.task == "score":
            return tally(lambda x: self.method.client_predict(self.fast, state, down, x), data.x, data.y, data.real)
        if job.task == "score_global":
            return tally(lambda x: global_logits(self.method, self.fast, job.told, x), data.x, data.y, data.real)
        return act(self.method, self.fast, job, data, state, down)

    def _score_global(self, job: Job, cohort: Cohort) -> Tensor:
        held = self.samples[job.split]
        with torch.no_grad():
            judged = [
                judge(global_logits(self.method, self.fast, job.told, held.x[part]), held.y[part])
                for part in slices(len(held.y), GLOBAL_BATCH)
            ]
        counted = torch.zeros(len(held.ranges), 2, dtype=torch.float64, device=self.device)
        return counted.index_add_(0, held.owners, torch.cat(judged))[cohort.ids]


class Samples:
    """A split of all clients on the device, and where each client's samples are."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.x, self.y, self.ranges = split.x.to(device), split.y.to(device), split.ranges()
        self.owners = split.owners().to(device)  # (N,)
        self.sizes = torch.tensor(split.sizes).to(device)  # (m,)
        last = max(len(split.y) - 1, 0)
        self.starts = torch.tensor(split.starts[:-1]).clamp_max(last).to(device)  # (m,)

    def padded(self, cohort: Cohort) -> tuple[Tensor, Any]:
        """(C, n) places of the cohort's samples, and which are real; () if all are. Padding is an own sample."""
        place = torch.arange(cohort.length, device=self.y.device)
        real = place < self.sizes[cohort.ids][:, None]
        places = torch.where(real, place, 0) + self.starts[cohort.ids][:, None]
        return places, real if cohort.ragged else ()


def lean(given: Any) -> tuple[Any, Any, str]:
    """Without the copies of what all clients are sent alike; where the client axis is; and the same as a name.

    BatchNorm's statistics keep their axis: each client writes into its own.
    """
    shared = {name: tree.alike(t) and not tree.is_statistic(name) for name, t in tree.items(given)}
    dims: dict[str, Any] = {name: None if one else 0 for name, one in shared.items()}
    leaves = {name: t[0] if shared[name] else t for name, t in tree.items(given)}
    form = "".join("1" if one else "m" for one in shared.values())
    return tree.fill(given, leaves), tree.fill(given, dims), form


def memory(gpu: torch.device) -> int:
    """Bytes."""
    return torch.cuda.get_device_properties(gpu).total_memory


def has_dropout(model: Model) -> bool:
    modules = (*model.encoder.modules(), *model.head.modules())
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules)
