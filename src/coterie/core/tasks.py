"""The tasks other than classification: several labels, numbers, pixels, tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import metrics
from coterie.core.errors import CoterieError, unknown
from coterie.core.importing import imported, is_code
from coterie.core.metrics import SummedMetric
from coterie.core.task import SMALLEST, Classification, Task, check_classes, labels_loss, most_probable


class MultiLabel(Task):
    """Any number of labels per sample, by binary cross entropy. Outputs are logits (B, L), labels (B, L) of 0 and 1."""

    name = "multi-label"
    label_type = torch.float32

    def __init__(self, labels: int, metric: str | None = None) -> None:
        super().__init__(metrics.LABELS, metric, labels=labels)
        self.labels = labels

    @classmethod
    def fitted(cls, y: Tensor, classes: int, **options: Any) -> Self:
        return cls(**{"labels": y.shape[1], **options})

    @property
    def width(self) -> int:
        return self.labels

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (F.softplus(output) - output * y.to(output.dtype)).mean(1)

    def mix(self, outputs: Tensor, shares: Tensor) -> Tensor:
        log = shares.clamp_min(SMALLEST).log()[:, None, None]
        yes, no = ((F.logsigmoid(sign * outputs) + log).logsumexp(0) for sign in (1, -1))
        return yes - no

    def read(self, output: Tensor) -> Tensor:
        return output.sigmoid()

    def answer(self, read: Tensor, names: Sequence[str], top: int) -> dict[str, Any]:
        called = names or [str(k) for k in range(self.labels)]
        found = [{"label": name, "probability": p} for name, p in zip(called, read.tolist(), strict=True)]
        return {"labels": found, "set": [one["label"] for one in found if one["probability"] > 0.5]}

    def check_labels(self, y: Tensor, where: str = "labels") -> None:
        if y.shape[1:] != (self.labels,):
            raise CoterieError(
                f"{where}: multi-label needs {self.labels} columns of 0 and 1, got shape {tuple(y.shape)}"
            )
        if not ((y == 0) | (y == 1)).all():
            raise CoterieError(f"{where}: multi-label needs labels of 0 and 1, got values up to {float(y.max()):g}")

    def check_output(self, shape: tuple[int, ...], label: tuple[int, ...]) -> None:
        if shape != (self.labels,):
            raise CoterieError(
                f"the model returns outputs of shape {shape}, it must return one logit for each of {self.labels} labels"
            )

    def described(self) -> str:
        return f"multi-label, {self.labels} labels"


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": torch.square,
    "mae": torch.abs,
    "huber": lambda error: torch.where(error.abs() < 1, error.square() / 2, error.abs() - 0.5),
}


class Regression(Task):
    """One or several numbers per sample. Outputs and labels are (B, T).

    mean, std: (T,) of the training labels; the deviation of a constant is set to 1. The network learns (label - mean) /
    std, and the model gives outputs in the units of the labels. loss: mse, mae or huber (quadratic below one standard
    deviation), of standardized errors.
    """

    name = "regression"
    label_type = torch.float32
    standardized = True
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        targets: int,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        loss: str = "mse",
        metric: str | None = None,
    ) -> None:
        mean, std = list(mean) or [0.0] * targets, list(std) or [1.0] * targets
        if not all(math.isfinite(value) for value in (*mean, *std)) or min(std, default=0) < 0:
            raise CoterieError(f"mean and std of regression are finite, and std at least 0, got mean={mean}, std={std}")
        std = [s if s > 1e-8 * abs(m) else 1.0 for m, s in zip(mean, std, strict=False)]
        super().__init__(metrics.of_numbers(targets), metric, targets=targets, mean=mean, std=std, loss=loss)
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        if not len(mean) == len(std) == targets:
            raise CoterieError(f"regression on {targets} targets needs as many means and deviations")
        self.targets, self.error = targets, loss
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64).float(), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float64).float(), persistent=False)

    @classmethod
    def fitted(cls, y: Tensor, classes: int, **options: Any) -> Self:
        """Mean and standard deviation are those of y."""
        mean, std = y.double().mean(0), y.double().std(0, correction=0)
        return cls(**{"targets": y.shape[1], "mean": mean.tolist(), "std": std.tolist(), **options})

    @property
    def width(self) -> int:
        return self.targets

    @property
    def constant(self) -> Tensor:  # type: ignore[override]
        return self.mean

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return LOSSES[self.error]((output - y) / self.std).mean(1)

    def scale(self, output: Tensor) -> Tensor:
        return output * self.std + self.mean

    def answer(self, read: Tensor, names: Sequence[str], top: int) -> dict[str, Any]:
        called = names or [f"target {k}" if self.targets > 1 else "target" for k in range(self.targets)]
        return {"values": dict(zip(called, read.tolist(), strict=True))}

    def check_labels(self, y: Tensor, where: str = "labels") -> None:
        if not y.is_floating_point() or y.shape[1:] != (self.targets,):
            raise CoterieError(
                f"{where}: regression needs {self.targets} numbers per sample, got {y.dtype} {tuple(y.shape)}"
            )
        if not y.isfinite().all():
            raise CoterieError(f"{where}: {int((~y.isfinite()).any(1).sum())} samples have a target that is not finite")

    def check_output(self, shape: tuple[int, ...], label: tuple[int, ...]) -> None:
        if shape != (self.targets,):
            raise CoterieError(
                f"the model returns outputs of shape {shape}, it must return {self.targets} number"
                f"{'s' * (self.targets > 1)} per sample, shape ({self.targets},)"
            )

    def described(self) -> str:
        return f"regression, {self.targets} target{'s' * (self.targets > 1)}, {self.error}"


class Segmentation(Task):
    """One class per pixel. Outputs are logits (B, K, H, W), labels (B, H, W); pixels with label -1 are ignored."""

    name = "segmentation"
    class_axis = 1

    def __init__(self, classes: int, metric: str | None = None) -> None:
        super().__init__(metrics.of_pixels(classes), metric, classes=classes)
        self.classes = classes

    @classmethod
    def fitted(cls, y: Tensor, classes: int, **options: Any) -> Self:
        return cls(**{"classes": classes, **options})

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return labels_loss(output, y)

    def read(self, output: Tensor) -> Tensor:
        return output.softmax(1)

    def answer(self, read: Tensor, names: Sequence[str], top: int) -> dict[str, Any]:
        chosen = read.argmax(0)
        pixels = torch.bincount(chosen.flatten(), minlength=self.classes).tolist()
        called = names or [str(k) for k in range(self.classes)]
        return {"map": chosen.tolist(), "pixels": dict(zip(called, pixels, strict=True))}

    def check_labels(self, y: Tensor, where: str = "labels") -> None:
        check_classes(y, self.classes, 2, where)

    def check_output(self, shape: tuple[int, ...], label: tuple[int, ...]) -> None:
        if shape != (self.classes, *label):
            raise CoterieError(
                f"the model returns outputs of shape {shape}, it must return logits of shape {(self.classes, *label)}: "
                "classes, height, width; model='unet' does"
            )

    def described(self) -> str:
        return f"segmentation, {self.classes} classes"


class NextToken(Task):
    """The next token of a sequence. Outputs are logits (B, T, V), labels (B, T); tokens with label -1 are ignored."""

    name = "next-token"
    class_axis = 2

    def __init__(self, classes: int, metric: str | None = None) -> None:
        perplexity = SummedMetric(
            "perplexity", token_losses, lambda sums: metrics.ratio(sums).exp(), higher=False, share=False
        )
        accuracy = SummedMetric("accuracy", lambda output, y: metrics.hits(output.movedim(2, 1), y), metrics.ratio)
        super().__init__((accuracy, perplexity), metric, classes=classes)
        self.classes = classes  # V

    @classmethod
    def fitted(cls, y: Tensor, classes: int, **options: Any) -> Self:
        return cls(**{"classes": classes, **options})

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return labels_loss(output.movedim(2, 1), y)

    def read(self, output: Tensor) -> Tensor:
        return output.softmax(2)

    def answer(self, read: Tensor, names: Sequence[str], top: int) -> dict[str, Any]:
        return {"tokens": read.argmax(1).tolist(), "next": most_probable(read[-1], names, top, "token")}

    def check_labels(self, y: Tensor, where: str = "labels") -> None:
        check_classes(y, self.classes, 1, where)

    def check_output(self, shape: tuple[int, ...], label: tuple[int, ...]) -> None:
        if shape != (*label, self.classes):
            raise CoterieError(
                f"the model returns outputs of shape {shape}, it must return logits of shape {(*label, self.classes)}: "
                "tokens, vocabulary"
            )

    def described(self) -> str:
        return f"next token, vocabulary of {self.classes}"


def token_losses(output: Tensor, y: Tensor) -> Tensor:
    """(B, 2): the cross entropy of a sample's tokens, and their number."""
    count = (y >= 0).sum(1)
    return torch.stack([labels_loss(output.movedim(2, 1), y).double() * count, count.double()], 1)


def task_class(name: str | type[Task]) -> type[Task]:
    """The class of a task: by name, by import path package.module:Class, or given."""
    found: Any = name
    if isinstance(name, str):
        if not is_code(name) and name not in TASKS:
            raise unknown("task", name, TASKS)
        found = imported("task", name) if is_code(name) else TASKS[name]
    if not isinstance(found, type) or not issubclass(found, Task):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise CoterieError(f"task '{name}' is {kind}, not a subclass of coterie.Task")
    missing = [*sorted(found.__abstractmethods__), *([] if hasattr(found, "name") else ["name"])]
    if missing:
        raise CoterieError(f"task '{found.__name__}' does not define {', '.join(missing)}")
    return found


TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (Classification, MultiLabel, Regression, Segmentation, NextToken)
}
