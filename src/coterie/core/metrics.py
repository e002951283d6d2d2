"""Metrics of a model on one client's samples.

A metric whose value follows from sums over samples is cheap, and is measured in every round, stacked or looped. Others,
such as AUROC, need all outputs at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.core.user_code import failure, users_lines

MOST_TARGETS = 50  # with an RMSE of their own
BINS = 15  # of the expected calibration error


@dataclass(frozen=True)
class Metric(ABC):
    name: str
    higher: bool = field(default=True, kw_only=True)  # whether larger values are better
    share: bool = field(default=True, kw_only=True)  # whether values are in 0..1, and shown in percent
    counts: bool = field(default=False, kw_only=True)  # whether a value is the share of samples that are right

    @property
    def scale(self) -> MetricScale:
        return MetricScale(self.name, self.higher, self.share, self.counts)

    @abstractmethod
    def __call__(self, output: Tensor, y: Tensor) -> Tensor | float:
        """The value on all samples of a client: output (n, ...), y (n, ...). NaN where it is undefined."""


def measure(metric: Metric, output: Tensor, y: Tensor) -> Tensor:
    """() float64, the metric of outputs (n, ...) and labels (n, ...). Errors name the metric."""
    try:
        made: object = metric(output, y)
    except Exception as error:
        if isinstance(error, CoterieError) or not users_lines(error):
            raise
        raise failure(f"the metric '{metric.name}' failed", error) from error
    try:
        value = torch.as_tensor(made, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        value = torch.zeros(0)
    if value.ndim:
        found = f"values of shape {tuple(value.shape)}" if len(value) else f"a {type(made).__name__}"
        raise CoterieError(
            f"the metric '{metric.name}' returns {found}; it must return one number for all samples of a client, NaN "
            "where it is undefined"
        )
    return value


@dataclass(frozen=True)
class SummedMetric(Metric):
    """A metric that follows from sums over samples."""

    parts: Callable[[Tensor, Tensor], Tensor]  # output, label -> (B, S), to be added over samples
    value: Callable[[Tensor], Tensor]  # sums (..., S) -> (...)
    width: int = 2  # S

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        return self.value(self.parts(output, y).double().sum(0))


@dataclass(frozen=True)
class OutputMetric(Metric):
    """A metric that needs all outputs of a client at once."""

    compute: Callable[[Tensor, Tensor], Tensor | float]

    def __call__(self, output: Tensor, y: Tensor) -> Tensor | float:
        return self.compute(output, y)


def ratio(sums: Tensor) -> Tensor:
    """sums (..., 2): numerator and denominator; NaN for 0 / 0."""
    return sums[..., 0] / sums[..., 1]


# Classes: outputs (n, K, ...), labels (n, ...). Labels below 0 are ignored.


def hits(output: Tensor, y: Tensor) -> Tensor:
    """(B, 2): correct labels of a sample, and its labels."""
    known = y >= 0
    right = (output.argmax(1) == y) & known
    return torch.stack([t.flatten(1).sum(1) if y.ndim > 1 else t.long() for t in (right, known)], 1)


def confusion(output: Tensor, y: Tensor) -> Tensor:
    """(K, K) counts: row = label, column = prediction."""
    classes, known = output.shape[1], y >= 0
    cell = y[known] * classes + output.argmax(1)[known]
    return torch.bincount(cell, minlength=classes * classes).view(classes, classes).double()


def per_class(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(K,) true positives, predictions and labels of every class."""
    table = confusion(output, y)
    return table.diagonal(), table.sum(0), table.sum(1)


def balanced_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Mean recall over the classes that occur."""
    right, _, labels = per_class(output, y)
    return (right / labels)[labels > 0].mean()


def class_f1(output: Tensor, y: Tensor) -> Tensor:
    """(K,) F1 of every class; NaN for classes that neither occur nor are predicted."""
    right, predicted, labels = per_class(output, y)
    return 2 * right / (predicted + labels)


def macro_f1(output: Tensor, y: Tensor) -> Tensor:
    """Mean F1 over the classes that occur or are predicted."""
    return class_f1(output, y).nanmean()


def recall(of: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Recall of one class."""

    def metric(output: Tensor, y: Tensor) -> Tensor:
        right, _, labels = per_class(output, y)
        return right[of] / labels[of]

    return metric


def area(score: Tensor, positive: Tensor) -> Tensor:
    """() AUROC: how often a positive sample scores higher than a negative one; ties count half. NaN without either."""
    _, place, count = torch.unique(score, return_inverse=True, return_counts=True)
    above = count.cumsum(0) - (count - 1) / 2  # mean rank of equal scores, from 1
    ranks, n = above[place].double(), positive.sum()
    wins: Tensor = ranks[positive].sum() - n * (n + 1) / 2
    return wins / (n * (len(score) - n))


def precision_area(score: Tensor, positive: Tensor) -> Tensor:
    """() average precision: mean over positives of the precision at their score. NaN without positives."""
    values, place = torch.unique(score, return_inverse=True)
    labels = torch.zeros(len(values), 2, dtype=torch.float64)
    labels.index_put_((place, positive.long()), torch.ones((), dtype=torch.float64), accumulate=True)
    above = labels.flip(0).cumsum(0).flip(0)  # negatives and positives with at least this score
    precision = above[:, 1] / above.sum(1)
    return (precision * labels[:, 1]).sum() / labels[:, 1].sum()


def one_against_rest(judge: Callable[[Tensor, Tensor], Tensor], positive: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A metric of a score, for classes: of the positive one of two, else the mean over classes with both kinds."""

    def metric(output: Tensor, y: Tensor) -> Tensor:
        probability = output.double().softmax(1)
        if output.shape[1] == 2:
            return judge(probability[:, positive], y == positive)
        return torch.stack([judge(probability[:, k], y == k) for k in range(output.shape[1])]).nanmean()

    return metric


def calibration_error(output: Tensor, y: Tensor) -> Tensor:
    """Expected calibration error over equal bins of confidence."""
    confidence, predicted = output.double().softmax(1).max(1)
    place = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, confidence - (predicted == y).double())
    return gap.abs().sum() / len(y)


# Several labels: outputs (n, L), labels (n, L) of 0 and 1.


def label_parts(output: Tensor, y: Tensor) -> Tensor:
    """(B, 2): twice the true positives; predictions and labels."""
    predicted, positive = output > 0, y > 0.5
    return torch.stack([2 * (predicted & positive).sum(1), predicted.sum(1) + positive.sum(1)], 1)


def exact_match(output: Tensor, y: Tensor) -> Tensor:
    right = ((output > 0) == (y > 0.5)).all(1)
    return torch.stack([right.long(), torch.ones_like(right).long()], 1)


def macro_label_f1(output: Tensor, y: Tensor) -> Tensor:
    predicted, positive = output > 0, y > 0.5
    return (2 * (predicted & positive).sum(0) / (predicted.sum(0) + positive.sum(0))).nanmean()


def each_label(judge: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean over labels of a metric of a score."""
    return lambda output, y: torch.stack([judge(s, p > 0.5) for s, p in zip(output.T, y.T, strict=True)]).nanmean()


# Numbers: outputs and labels (n, T).


def squared_errors(output: Tensor, y: Tensor) -> Tensor:
    """(B, 2): squared error, and one; the mean over targets."""
    error = (output.double() - y.double()).square().mean(1)
    return torch.stack([error, torch.ones_like(error)], 1)


def absolute_errors(output: Tensor, y: Tensor) -> Tensor:
    error = (output.double() - y.double()).abs().mean(1)
    return torch.stack([error, torch.ones_like(error)], 1)


def variance_explained(output: Tensor, y: Tensor) -> Tensor:
    """R², the mean over the targets that vary. NaN if none does."""
    y, output = y.double(), output.double()
    total = (y - y.mean(0)).square().sum(0)
    return (1 - (y - output).square().sum(0) / torch.where(total > 0, total, torch.nan)).nanmean()


# Pixels: outputs (n, K, H, W), labels (n, H, W).


def overlaps(output: Tensor, y: Tensor) -> Tensor:
    """(B, 2 K): intersection, and the sum of both areas, of every class. Ignored pixels have no part."""
    known = (y >= 0).unsqueeze(1)
    label = F.one_hot(y.clamp_min(0), output.shape[1]).movedim(-1, 1).bool() & known  # (B, K, H, W)
    predicted = F.one_hot(output.argmax(1), output.shape[1]).movedim(-1, 1).bool() & known
    both = (label & predicted).flatten(2).sum(2)
    return torch.cat([both, label.flatten(2).sum(2) + predicted.flatten(2).sum(2)], 1)


def mean_iou(sums: Tensor) -> Tensor:
    """Intersection over union, the mean over the classes that occur or are predicted."""
    both, areas = sums.double().chunk(2, -1)
    return (both / (areas - both)).nanmean(-1)


def mean_dice(sums: Tensor) -> Tensor:
    both, areas = sums.double().chunk(2, -1)
    return (2 * both / areas).nanmean(-1)


ACCURACY = SummedMetric("accuracy", hits, ratio, counts=True)
LABELS: tuple[Metric, ...] = (
    SummedMetric("micro_f1", label_parts, ratio),
    SummedMetric("exact_match", exact_match, ratio, counts=True),
    OutputMetric("macro_f1", macro_label_f1),
    OutputMetric("auroc", each_label(area)),
    OutputMetric("average_precision", each_label(precision_area)),
)
NUMBERS: tuple[Metric, ...] = (
    SummedMetric("rmse", squared_errors, lambda sums: ratio(sums).sqrt(), higher=False, share=False),
    SummedMetric("mae", absolute_errors, ratio, higher=False, share=False),
    OutputMetric("r2", variance_explained, share=False),
)


def of_classes(classes: int, positive: int = 1) -> tuple[Metric, ...]:
    """positive: the class that sensitivity and average precision are about, of two."""
    found = (
        ACCURACY,
        OutputMetric("balanced_accuracy", balanced_accuracy),
        OutputMetric("macro_f1", macro_f1),
        OutputMetric("auroc", one_against_rest(area, positive)),
        OutputMetric("average_precision", one_against_rest(precision_area, positive)),
        OutputMetric("calibration_error", calibration_error, higher=False),
    )
    if classes != 2:
        return found
    return *found, OutputMetric("sensitivity", recall(positive)), OutputMetric("specificity", recall(1 - positive))


def of_numbers(targets: int) -> tuple[Metric, ...]:
    """Several targets, unless they are very many, also have an RMSE each, in the units of the target."""

    def rmse(k: int) -> Metric:
        def parts(output: Tensor, y: Tensor) -> Tensor:
            return squared_errors(output[:, k : k + 1], y[:, k : k + 1])

        return SummedMetric(f"rmse_target_{k}", parts, lambda sums: ratio(sums).sqrt(), higher=False, share=False)

    return (*NUMBERS, *map(rmse, range(targets if 1 < targets <= MOST_TARGETS else 0)))


def of_pixels(classes: int) -> tuple[Metric, ...]:
    iou = SummedMetric("miou", overlaps, mean_iou, 2 * classes)
    accuracy = SummedMetric("accuracy", hits, ratio)
    return (iou, SummedMetric("dice", overlaps, mean_dice, 2 * classes), accuracy)
