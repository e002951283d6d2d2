"""Every metric of the task after the last round: of each client's personal model, and of the global model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.metric_scale import MetricScale
from coterie.execution import LocalBackend
from coterie.execution.requests import send
from coterie.federation.history import worst_tenth

PERSONAL, GLOBAL = "personal", "global"


class FinalMetrics(NamedTuple):
    """All metrics on the test samples of every client."""

    metrics: tuple[MetricScale, ...]
    values: Mapping[str, Tensor]  # personal or global -> (m, M); NaN: undefined
    confusion: Tensor | None = None  # (K, K) of personal models over all clients: row = label, column = prediction

    def summary(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Model -> metric -> mean over clients, and mean of the worst tenth."""
        return {
            model: {metric.name: means(values[:, at], metric) for at, metric in enumerate(self.metrics)}
            for model, values in self.values.items()
        }

    def rows(self) -> list[list[Any]]:
        """The content of evaluation.csv."""
        header = ["client", "model", *(metric.name for metric in self.metrics)]
        body = [
            [client, model, *(stored(v, metric) for v, metric in zip(own, self.metrics, strict=True))]
            for model, values in self.values.items()
            for client, own in enumerate(values.tolist())
        ]
        return [header, *body]


def means(values: Tensor, metric: MetricScale) -> dict[str, float | None]:
    known = metric.from_worst(values[values.isfinite()].tolist())
    if not known:
        return {"mean": None, "worst10": None, "clients": 0}
    tenth = known[: worst_tenth(len(known))]
    return {"mean": math.fsum(known) / len(known), "worst10": math.fsum(tenth) / len(tenth), "clients": len(known)}


def stored(value: float, metric: MetricScale) -> float | str:
    return metric.stored(value) if math.isfinite(value) else ""


def measure_every(backend: LocalBackend, server: Any) -> FinalMetrics | None:
    """Evaluate the models that the run keeps; None without test samples."""
    if not sum(backend.split("test").sizes):
        return None
    task = backend.model.task
    count, tested = len(task.metrics), torch.tensor(backend.split("test").sizes) > 0
    own = backend.every("score", "test", send(backend.method, server, backend.everyone))
    values = {PERSONAL: own}
    if not backend.method.personal_is_global and backend.predicts_globally(server):
        values[GLOBAL] = backend.every("score_global", "test", (), server)
    detail = own[tested, count + 1 :].sum(0)
    confusion = detail.view(task.classes, task.classes).long() if task.one_class and detail.numel() else None
    scores = {name: torch.where(tested[:, None], found[:, :count], torch.nan) for name, found in values.items()}
    return FinalMetrics(tuple(metric.scale for metric in task.metrics), scores, confusion)
