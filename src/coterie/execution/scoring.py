"""How well models do on clients' samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import padding
from coterie.core.batch import TEST_BATCH
from coterie.core.data import FederatedData
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.execution.requests import slices


class Scores(NamedTuple):
    """Results of a model on each client's samples. All (S,)."""

    clients: Tensor
    correct: Tensor
    total: Tensor
    loss: Tensor  # mean cross entropy

    @property
    def accuracy(self) -> Tensor:
        return self.correct / self.total.clamp_min(1)


def global_logits(method: AnyMethod, model: Model, server: Any, x: Tensor) -> Tensor:
    logits = method.server_predict(model, server, x)
    if logits is None:
        raise ValueError(f"{method.title} has no global model")
    return logits


def has_global(method: AnyMethod, model: Model, server: Any, data: FederatedData) -> bool:
    x = data.train.x[:2].to(model.mean.device)  # two: BatchNorm cannot train on one
    with torch.no_grad():
        return method.server_predict(model, server, x) is not None


def judge(logits: Tensor, y: Tensor) -> Tensor:
    """(n, 2): whether each sample is classified correctly, 0 or 1, and its cross entropy."""
    right = (logits.argmax(1) == y).to(torch.float64)
    return torch.stack([right, F.cross_entropy(logits, y, reduction="none").to(torch.float64)], 1)


def tally(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
    """(2,): the number of correctly classified samples and the sum of cross entropies."""
    total = torch.zeros(2, dtype=torch.float64, device=y.device)
    with torch.no_grad():
        for part in slices(len(y), TEST_BATCH):
            with padding.known(None if real is None else real[part]):
                judged = judge(predict(x[part]), y[part])  # (B, 2)
            total = total + (judged if real is None else torch.where(real[part, None], judged, 0.0)).sum(0)
    return total


def majority_share(class_counts: Tensor) -> float:
    """Majority-class accuracy, from class counts (m, K)."""
    counts = class_counts.sum(0)
    return float(counts.max() / counts.sum().clamp_min(1))
