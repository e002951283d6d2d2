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
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, out_of_memory
from coterie.core.forward import attention_for_vmap
from coterie.core.method import AnyMethod
from coterie.core.metrics import SummedMetric
from coterie.core.model import Model
from coterie.execution.backend import TOO_LARGE, LocalBackend, check_draws
from coterie.execution.cohorts import CohortPartition, largest_cohort, memory
from coterie.execution.device_split import device_splits
from coterie.execution.graphs import Graphs, unrecorded
from coterie.execution.process import keep_freed_memory
from coterie.execution.requests import Cohort, Request, act, keys_for
from coterie.execution.scoring import measured, slices
from coterie.gpu import devices, sampling
from coterie.gpu.fusion import fuse
from coterie.gpu.operations import fused_on
from coterie.gpu.recording import CudaGraphs

RECORDINGS = 1 / 16  # of its memory, for what recordings read and write


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
        check_draws(model)
        if devices.runs_triton(self.device):
            self.fast = fuse(self.model)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.most = cohort
        self.partition = CohortPartition(method, self.model, data)
        self.samples = device_splits(data, self.device)
        on_gpu = self.device.type == "cuda"
        self.graphs = Graphs(CudaGraphs(self.device), RECORDINGS * memory(self.device)) if on_gpu else Graphs(None)

    @property
    def limit(self) -> int:
        """Largest number of stacked clients."""
        if self.most is not None:
            return self.most
        return largest_cohort(self.device, self.burden)

    def cohorts(self, request: Request, clients: Tensor) -> list[Cohort]:
        return self.partition(request, clients, self.limit, self.device)

    def compute(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        with devices.selected(self.device), fused_on(self.device), attention_for_vmap(self.device):
            if request.action == "score_global" and not (self.model.tests_by_client or request.every):
                held = self.samples[request.split]
                return held.score_global(self.method, self.fast, request.shared, cohort.ids)
            made = self._fitting(request, cohort, states, downs)
            if not request.action.startswith("score") or (
                isinstance(self.model.task.metric, SummedMetric) and not request.every
            ):
                return made
            task, labels = self.fast.task, self.samples[request.split].labels(cohort)
            rows = zip(made, labels, strict=True)
            return torch.stack([measured(task, output[: len(y)], y, request.every) for output, y in rows])

    def _fitting(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        """Compute the cohort, in halves if it does not fit into memory, unrecorded if it cannot be recorded."""
        count = size = len(cohort.clients)
        try:
            return self._run(request, cohort, states, downs)
        except RuntimeError as error:
            if out_of_memory(error):
                if count == 1:
                    raise CoterieError(TOO_LARGE) from None
                size = self.most = (count + 1) // 2
            elif self.graphs.recorder:
                self.graphs = unrecorded(error)
            else:
                raise
        self.graphs.captured.clear()
        torch.cuda.empty_cache()
        parts = []
        for part in slices(count, size):
            half = cohort._replace(clients=cohort.clients[part], ids=cohort.ids[part], rows=cohort.rows[part])
            rows = torch.arange(part.start, part.stop, device=self.device)
            parts.append(self._fitting(request, half, *tree.pick((states, downs), rows)))
        return tree.join(parts)

    def _run(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        held = self.samples[request.split]
        given, dims, form = lean((states, downs))

        def client(x: Tensor, y: Tensor, real: Any, key: Tensor, rate: Tensor, shared: Any, given: Any) -> Any:
            mask = real if isinstance(real, Tensor) else None
            data = Data(x, y, key, rate, self.data.classes, self.data.transform, mask, draws=self.model.hashed)
            return act(self.method, self.fast, request._replace(shared=shared), data, *given)

        def body(samples: Tensor, real: Any, key: Tensor, rate: Tensor, shared: Any, given: Any) -> Any:
            together = torch.func.vmap(client, in_dims=(0, 0, 0, 0, None, None, dims))
            return together(sampling.take(held.x, samples), held.y[samples], real, key, rate, shared, given)

        key = keys_for(request, self.seed, cohort.ids)
        rate = torch.full((), request.turn.rate, dtype=self.model.mean.dtype, device=self.device)
        inputs = (*held.padded(cohort), key, rate, request.shared, given)
        return self.graphs.run(f"{request.action} {request.split} {request.every} {form}", body, inputs)


def lean(given: Any) -> tuple[Any, Any, str]:
    """Trees without copies of rows that are equal for all clients, their vmap in_dims, and the in_dims as a string.

    BatchNorm's statistics keep their axis: each client writes into its own.
    """
    shared = {name: tree.alike(t) and not tree.is_statistic(name) for name, t in tree.items(given)}
    dims: dict[str, Any] = {name: None if one else 0 for name, one in shared.items()}
    leaves = {name: t[0] if shared[name] else t for name, t in tree.items(given)}
    form = "".join("1" if one else "m" for one in shared.values())
    return tree.fill(given, leaves), tree.fill(given, dims), form
