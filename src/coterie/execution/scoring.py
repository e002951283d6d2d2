"""How well models do on clients' samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import padding
from coterie.core.batch import TEST_BATCH, Data
from coterie.core.data import FederatedData, Split
from coterie.core.method import AnyMethod
from coterie.core.metrics import ACCURACY, SummedMetric, measure
from coterie.core.model import Model
from coterie.core.task import Task
from coterie.core.tasks import TASKS

TRIED = 64  # samples of a client that own metrics are tried on
SERVER = -1  # in place of a client: the server's own test samples


class Scores(NamedTuple):
    """Results of a model on each client's samples. All (S,)."""

    clients: Tensor
    weighted: Tensor  # value times total: for accuracy, the number of correct samples
    total: Tensor  # samples
    loss: Tensor  # mean over samples

    @property
    def value(self) -> Tensor:
        """Of the task's metric, such as accuracy; NaN where it is undefined."""
        return self.weighted / self.total.clamp_min(1)

    @property
    def defined(self) -> Tensor:
        """Which clients have samples, and a value."""
        return (self.total > 0) & self.weighted.isfinite()


def global_logits(method: AnyMethod, model: Model, server: Any, x: Tensor) -> Tensor:
    logits = method.server_predict(model, server, x)
    if logits is None:
        raise ValueError(f"{method.title} has no global model")
    return logits


def has_global(method: AnyMethod, model: Model, server: Any, data: FederatedData) -> bool:
    x = data.train.x[:2].to(model.mean.device)  # two: BatchNorm cannot train on one
    with torch.no_grad():
        return method.server_predict(model, server, x) is not None


def judge(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """(B, S + 1): the parts of the task's metric, which must be a `SummedMetric`, and the loss, of every sample."""
    assert isinstance(task.metric, SummedMetric)
    parts, loss = task.metric.parts(output, y), task.loss(output, y)
    return torch.cat([parts.to(torch.float64), loss.to(torch.float64)[:, None]], 1)


def score(predict: Callable[[Tensor], Tensor], data: Data, task: Task, every: bool = False) -> Tensor:
    """How a client's model does on its samples.

    (S + 1,) the sums of `judge`, for a `SummedMetric`; otherwise, or for every metric of the task, `measured`. Under
    vmap, `measured` cannot be computed: the outputs (n, ...) are returned instead. every: the client has samples.
    """
    with torch.no_grad():
        if isinstance(task.metric, SummedMetric) and not every:
            total = torch.zeros(task.metric.width + 1, dtype=torch.float64, device=data.y.device)
            for part, output in outputs_of(predict, data):
                judged = judge(task, output, data.y[part])
                real = None if data.real is None else data.real[part, None]
                total = total + (judged if real is None else torch.where(real, judged, 0.0)).sum(0)
            return total
        if not len(data.y):
            return torch.zeros(2, dtype=torch.float64, device=data.y.device)
        output = torch.cat([output for _, output in outputs_of(predict, data)])
        return measured(task, output, data.y, every) if data.alone else output


def outputs_of(predict: Callable[[Tensor], Tensor], data: Data) -> Iterator[tuple[slice, Tensor]]:
    """The outputs for a client's samples, part by part."""
    for part in slices(len(data.y), TEST_BATCH):
        with padding.known(None if data.real is None else data.real[part]):
            yield part, predict(data.x[part])


def weighed(task: Task, found: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """(...) value times samples, and mean loss, as in `Scores`. found: (..., S + 1) of `score`; total: (...)."""
    metric, samples = task.metric, total.to(found.device, non_blocking=True)
    value = metric.value(found[..., :-1]) if isinstance(metric, SummedMetric) else found[..., 0]
    weighted = torch.where(samples > 0, value * samples, 0.0)
    if metric.counts:
        weighted = weighted.round()  # a number of samples
    return weighted, found[..., -1] / samples.clamp_min(1)


def measured(task: Task, output: Tensor, y: Tensor, every: bool = False) -> Tensor:
    """(M + 1,): the task's metric, and the sum of losses. output, y: of all samples.

    every: all metrics that the task has, the sum of losses, and its `detail`. Metrics are computed on the CPU: ranks
    and bins need operations that are slow, wait, or are not deterministic on a GPU.
    """
    loss = task.loss(output, y).to(torch.float64).sum()  # on the device, where the task has its constants
    output, y = output.cpu(), y.cpu()
    metrics = task.metrics if every else (task.metric,)
    values = [measure(metric, output, y) for metric in metrics]
    found = torch.stack([*values, loss.cpu()])
    return (torch.cat([found, task.detail(output, y)]) if every else found).to(loss.device)


def try_metrics(model: Model, split: Split) -> None:
    """Compute the metrics of a user's task on samples of the first client that has some; each must be one number."""
    own = next((own for own in split.ranges() if own.stop > own.start), None)
    if own is None or type(model.task) in TASKS.values():
        return
    x, y = split.x[own][:TRIED], split.y[own][:TRIED]
    with torch.no_grad():
        output = model(model.start, x)
    for metric in model.task.metrics:
        measure(metric, output, y)


def slices(stop: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, stop)) for at in range(0, stop, size)]


def majority_share(class_counts: Tensor) -> float:
    """Majority-class accuracy, from class counts (m, K)."""
    counts = class_counts.sum(0)
    return float(counts.max() / counts.sum().clamp_min(1))


def constant_score(task: Task, split: Split) -> float | None:
    """The score of one output for all samples, where every sample counts the same; None: unknown."""
    if task.one_class and task.metric == ACCURACY:
        return majority_share(split.class_counts(task.classes))
    if task.constant is None or not len(split.y):
        return None
    labels = map(split.y.__getitem__, split.ranges())
    values = [(measure(task.metric, task.constant.expand_as(y), y), len(y)) for y in labels]
    found = sum(float(value) * samples for value, samples in values if samples) / len(split.y)
    return found if math.isfinite(found) else None
