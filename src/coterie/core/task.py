"""What a network is trained for and judged by: a loss per sample, metrics, and how to read an output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import metrics, ops
from coterie.core.errors import CoterieError, unknown
from coterie.core.metrics import Metric

IGNORED = -1  # the label of pixels and tokens without a loss
MOST_DETAILED = 100  # classes for which a run keeps the confusion matrix
SMALLEST = 1e-12  # share in a mixture, to take its logarithm


class Task(nn.Module, ABC):
    """What a network is trained for and judged by. Subclass it for a task of your own.

    A subclass defines `loss`, and passes its metrics to this constructor; the first is the default. Tensors that
    `loss` needs are buffers (persistent=False), so that they move with the model. Functions get batches of one client.
    """

    name: ClassVar[str]
    classes: int = 0  # K, of tasks that assign classes; 0: no classes
    one_class: ClassVar[bool] = False  # whether a sample has one class, which methods with prototypes need
    class_axis: ClassVar[int | None] = None  # axis of outputs along which logits of classes lie; None: no logits
    more_metrics: ClassVar[tuple[Metric, ...]] = ()  # in addition to those that a constructor passes
    label_type: ClassVar[torch.dtype] = torch.int64  # of labels; a floating type for numbers
    standardized: ClassVar[bool] = False  # whether options `mean` and `std` are those of the training labels
    constant: Tensor | None = None  # an output that fits all labels as well as one can; None: unknown

    def __init__(self, choice: Sequence[Metric], metric: str | None = None, **options: Any) -> None:
        """choice: the metrics. metric: name of the primary one. options: arguments that make an equal task, as JSON."""
        super().__init__()
        self.metrics, self.options = (
            (*choice, *self.more_metrics),
            {**options, **({} if metric is None else {"metric": metric})},
        )
        named = {one.name: one for one in self.metrics}
        if metric is not None and metric not in named:
            raise unknown(f"metric of {self.name}", metric, named)
        self.metric = self.metrics[0] if metric is None else named[metric]

    @abstractmethod
    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """(B,), of outputs (B, ...) and labels (B, ...)."""

    def scale(self, output: Tensor) -> Tensor:
        """Outputs of the network in the units of the labels. All other functions get these."""
        return output

    def read(self, output: Tensor) -> Tensor:
        """Outputs as a user reads them, such as probabilities."""
        return output

    def answer(self, read: Tensor, names: Sequence[str], top: int) -> dict[str, Any]:
        """The prediction for one sample, as JSON. read: its output by `read`. names: of classes or targets."""
        return {"output": read.tolist()}

    def detail(self, output: Tensor, y: Tensor) -> Tensor:
        """(D,) numbers for a table of all samples that add up over clients, such as a confusion matrix."""
        return output.new_zeros(0, dtype=torch.float64)

    def mix(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """(B, ...) the output of a mixture of models: outputs (M, B, ...) with shares (M,) that sum to 1.

        Probabilities are averaged where outputs are logits, and outputs elsewhere.
        """
        weights = shares.view(-1, *[1] * (outputs.ndim - 1))
        if self.class_axis is None:
            return (weights * outputs).sum(0)
        return (outputs.log_softmax(1 + self.class_axis) + weights.clamp_min(SMALLEST).log()).logsumexp(0)

    @classmethod
    def fitted(cls, y: Tensor, classes: int, **options: Any) -> Self:
        """The task of training labels (n, ...). classes: distinct labels in all splits; 0 for numbers."""
        return cls(**options)

    def example(self, label: tuple[int, ...]) -> Tensor:
        """(2, ...) two valid labels of this shape."""
        return torch.zeros(2, *label, dtype=self.label_type)

    def check_labels(self, y: Tensor, where: str = "labels") -> None:
        """Raise an error for labels (n, ...) that do not fit."""

    def check_output(self, shape: tuple[int, ...], label: tuple[int, ...]) -> None:
        """Raise an error for a network with outputs of this shape. label: the shape of one label."""

    @property
    def width(self) -> int:
        """Numbers that a network returns for a sample, a pixel or a token; for networks that are built by name."""
        return self.classes

    def described(self) -> str:
        """Such as: classification, 10 classes."""
        return self.name

    def having(self, **options: Any) -> Self:
        """The same task with other options."""
        return type(self)(**{**self.options, **options})


def check_loss(task: Task, output: Tensor, label: tuple[int, ...]) -> None:
    """Refuse losses without a gradient, or in which samples influence each other. output: of the network for two."""
    output, y = output.detach().requires_grad_(), task.example(label)
    if y.is_floating_point():
        y = y + torch.arange(2.0, dtype=y.dtype).view(2, *[1] * (y.ndim - 1))  # two different ones
    try:
        with torch.enable_grad():
            both = task.loss(task.scale(output), y)
        with torch.no_grad():
            scaled = task.scale(output)
            each = torch.cat([task.loss(scaled[i : i + 1], y[i : i + 1]) for i in (0, 1)])
    except Exception:  # of user's code, which is tried again with samples and then named
        return
    if both.numel() and not both.requires_grad:
        raise CoterieError(
            f"task {task.name}: the loss has no gradient with respect to the outputs, so nothing would be trained; "
            "compute it with differentiable operations of torch, without detach() and item()"
        )
    if both.shape == each.shape == (2,) and not torch.allclose(both, each, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise CoterieError(
            f"task {task.name}: the loss of a sample depends on the other samples of its batch; compute it from its "
            f"own output and label, without a mean over the batch (outputs have shape {tuple(output.shape)}, labels "
            f"{tuple(y.shape)})"
        )


def labels_loss(output: Tensor, y: Tensor) -> Tensor:
    """(B,) mean cross entropy of outputs (B, K, ...) over the labels (B, ...) of a sample that are not ignored."""
    known = y >= 0
    each = -F.log_softmax(output, 1).gather(1, y.clamp_min(0).unsqueeze(1)).squeeze(1)
    return torch.where(known, each, 0.0).flatten(1).sum(1) / known.flatten(1).sum(1).clamp_min(1)


class Classification(Task):
    """One class per sample, by cross entropy. Outputs are logits (B, K), labels (B,).

    class_weights: (K,) factors on the losses of a class; the loss of a batch is their plain mean, so weights of mean 1
    keep the learning rate meaningful. label_smoothing: share of a label that is spread over all classes. positive: the
    class that sensitivity and average precision are about, of two. In `task_args`, classes may be given by name.
    """

    name = "classification"
    one_class = True
    class_axis = 1
    weights: Tensor

    def __init__(
        self,
        classes: int,
        class_weights: Sequence[float] = (),
        label_smoothing: float = 0.0,
        positive: int = 1,
        metric: str | None = None,
    ) -> None:
        if positive not in (0, 1) or (positive == 0 and classes != 2):
            raise CoterieError(f"positive must be one of two classes, 0 or 1, got {positive!r} of {classes} classes")
        if isinstance(class_weights, str | Mapping) or not all(isinstance(w, int | float) for w in class_weights):
            raise CoterieError(f"class_weights are numbers, one for each class in order, got {class_weights!r}")
        own: dict[str, Any] = {"class_weights": list(map(float, class_weights))} if class_weights else {}
        own |= {"label_smoothing": label_smoothing} if label_smoothing else {}
        own |= {} if positive else {"positive": 0}
        super().__init__(metrics.of_classes(classes, positive), metric, classes=classes, **own)
        self.positive = positive
        if len(class_weights) not in (0, classes):
            raise CoterieError(
                f"class_weights must have a number for each of {classes} classes, got {len(class_weights)}"
            )
        if any(not 0 <= weight < math.inf for weight in class_weights) or (class_weights and not any(class_weights)):
            raise CoterieError(f"class_weights must be at least 0 and finite, and not all 0, got {list(class_weights)}")
        if not 0 <= label_smoothing < 1:
            raise CoterieError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
        self.classes, self.label_smoothing = classes, label_smoothing
        self.register_buffer("weights", torch.tensor(own.get("class_weights", [])), persistent=False)

    @classmethod
    def fitted(cls, y: Tensor, classes: int, **options: Any) -> Self:
        return cls(**{"classes": classes, **options})

    def example(self, label: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, self.classes - 1])

    @property
    def plain(self) -> bool:
        """Whether the loss is the cross entropy, without weights and smoothing."""
        return not (self.weights.numel() or self.label_smoothing)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        if self.plain:
            return ops.current().cross_entropy(output, y)
        log = F.log_softmax(output, 1)  # (B, K)
        if self.weights.numel():
            log = log * self.weights
        hit = -log.gather(1, y[:, None]).squeeze(1)
        return (1 - self.label_smoothing) * hit - self.label_smoothing * log.mean(1)

    def read(self, output: Tensor) -> Tensor:
        return output.softmax(1)

    def answer(self, read: Tensor, names: Sequence[str], top: int) -> dict[str, Any]:
        return {"classes": most_probable(read, names, top, "class")}

    def detail(self, output: Tensor, y: Tensor) -> Tensor:
        """The confusion matrix (K, K), row by row; nothing for many classes."""
        if self.classes > MOST_DETAILED:
            return super().detail(output, y)
        return metrics.confusion(output, y).flatten()

    def check_labels(self, y: Tensor, where: str = "labels") -> None:
        check_classes(y, self.classes, 0, where)

    def check_output(self, shape: tuple[int, ...], label: tuple[int, ...]) -> None:
        if shape != (self.classes,):
            raise CoterieError(
                f"the model returns outputs of shape {shape}, it must return one logit for each of {self.classes} "
                "classes"
            )

    def described(self) -> str:
        return f"classification, {self.classes} classes"


def most_probable(shares: Tensor, names: Sequence[str], top: int, what: str) -> list[dict[str, Any]]:
    """The most probable classes of (K,) probabilities, in order."""
    best = shares.topk(min(top, len(shares)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [{what: k, "name": names[k] if names else str(k), "probability": p} for p, k in pairs]


def check_classes(y: Tensor, classes: int, axes: int, where: str) -> None:
    """Raise an error unless labels are classes, with this many axes per sample."""
    if y.is_floating_point() or y.ndim != 1 + axes:
        raise CoterieError(f"{where}: expected class indices with {1 + axes} axes, got {y.dtype} {tuple(y.shape)}")
    low = IGNORED if axes else 0
    if y.numel() and not (low <= int(y.min()) and int(y.max()) < classes):
        ignored = f", and {IGNORED} where a label is ignored" if axes else ""
        raise CoterieError(f"{where}: classes are 0 to {classes - 1}{ignored}, got {int(y.min())} to {int(y.max())}")
