"""The samples of all clients on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core.data import FederatedData, Split
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.execution.cohorts import SPLITS
from coterie.execution.requests import Cohort
from coterie.execution.scoring import global_logits, judge, slices

GLOBAL_BATCH = 4096  # samples of one forward pass of the global model


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

    def places(self, client: int) -> Tensor:
        """(n,) positions of a client's samples."""
        own = self.ranges[client]
        return torch.arange(own.start, own.stop, device=self.y.device)

    def padded(self, cohort: Cohort) -> tuple[Tensor, Any]:
        """(C, n) positions of the cohort's samples, and which are real, () if all are. Padding repeats a sample."""
        place = torch.arange(cohort.length, device=self.y.device)
        real = place < self.sizes[cohort.ids][:, None]
        places = torch.where(real, place, 0) + self.starts[cohort.ids][:, None]
        return places, real if cohort.ragged else ()

    def score_global(self, method: AnyMethod, model: Model, server: Any, clients: Tensor) -> Tensor:
        """(C, S + 1) the sums of `scoring.judge` for the global model on these clients, in a few large batches."""
        with torch.no_grad():
            judged = [
                judge(model.task, global_logits(method, model, server, self.x[part]), self.y[part])
                for part in slices(len(self.y), GLOBAL_BATCH)
            ]
        every = torch.cat(judged)  # (N, S + 1)
        counted = every.new_zeros(len(self.ranges), every.shape[1])
        return counted.index_add_(0, self.owners, every)[clients]


def device_splits(data: FederatedData, device: torch.device) -> dict[str, DeviceSplit]:
    """All splits that the data have, by name."""
    held = {name: split for name in SPLITS if (split := getattr(data, name)) is not None}
    return {name: DeviceSplit(split, device) for name, split in held.items()}
