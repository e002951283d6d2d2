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
ALIKE = 1e-6  # scores that differ by less are the same measurement


class FinalMetrics(NamedTuple):
    """All metrics on the test samples of every client."""

    metrics: tuple[MetricScale, ...]
    values: Mapping[str, Tensor]  # personal or global -> (m, M); NaN: undefined
    confusion: Tensor | None = None  # (K, K) of personal models over all clients: row = label, column = prediction
    client_confusion: Tensor | None = None  # (N, 4) client, label, prediction and how many samples, at least 1

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

    def confusion_rows(self) -> list[list[Any]]:
        """The content of confusion.csv; classes by their number."""
        cells = [] if self.client_confusion is None else self.client_confusion.tolist()
        return [["client", "label", "prediction", "samples"], *cells]


def means(values: Tensor, metric: MetricScale) -> dict[str, float | None]:
    known = metric.from_worst(values[values.isfinite()].tolist())
    if not known:
        return {"mean": None, "worst10": None, "clients": 0}
    tenth = known[: worst_tenth(len(known))]
    return {"mean": math.fsum(known) / len(known), "worst10": math.fsum(tenth) / len(tenth), "clients": len(known)}


def reported_model(
    found: Mapping[str, Mapping[str, Mapping[str, Any]]], metric: str, point: str, score: float, finished: bool
) -> str | None:
    """The model with this mean score at a point, whose other metrics thus belong to it; None: it was not measured.

    found: as from `FinalMetrics.summary`. finished: whether a final step replaced the models that `pre` measured.
    """
    later = point == "global" or (point == "pre" and finished)
    for model in (GLOBAL, PERSONAL) if later else (PERSONAL, GLOBAL):
        own = found.get(model, {}).get(metric, {}).get("mean")
        if isinstance(own, int | float) and math.isclose(own, score, rel_tol=ALIKE, abs_tol=ALIKE):
            return model
    return None


def stored(value: float, metric: MetricScale) -> float | str:
    return metric.stored(value) if math.isfinite(value) else ""


def measure_every(backend: LocalBackend, server: Any) -> FinalMetrics | None:
    """Evaluate the models that the run keeps; None without test samples."""
    task, tested = backend.model.task, torch.tensor(backend.split("test").sizes).nonzero()[:, 0]
    if not len(tested):
        return None
    found = {PERSONAL: backend.every("score", tested, send(backend.method, server, tested))}
    kept_is_global = backend.method.personal_is_global and not backend.method.finishes
    if not kept_is_global and backend.predicts_globally(server):
        found[GLOBAL] = backend.every("score_global", tested, (), server)
    count = len(task.metrics)
    blank = torch.full((backend.num_clients, count), torch.nan, dtype=torch.float64)
    values = {model: blank.index_copy(0, tested, rows[:, :count]) for model, rows in found.items()}
    detail, scales = found[PERSONAL][:, count + 1 :], tuple(metric.scale for metric in task.metrics)
    if not task.one_class or not detail.numel():
        return FinalMetrics(scales, values)
    confusion = detail.sum(0).view(task.classes, task.classes).long()
    return FinalMetrics(scales, values, confusion, cells_of(detail.long(), tested, task.classes))


def cells_of(counts: Tensor, clients: Tensor, classes: int) -> Tensor:
    """(N, 4) client, label, prediction and samples, from counts (m, K * K); zeros are left out."""
    row, cell = counts.nonzero(as_tuple=True)
    return torch.stack([clients[row], cell // classes, cell % classes, counts[row, cell]], 1)
