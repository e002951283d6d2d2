"""Local training: epochs of shuffled batches, each a step of an optimizer.

`LocalTraining` trains the tree that it is given. What must stay frozen is not in that tree: close over it. Losses are
per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Batch, Data, Epoch
from coterie.core.errors import CoterieError, unknown
from coterie.core.gradients import Objective, gradient
from coterie.core.optimizers import OPTIMIZERS, Optimizer
from coterie.core.schedules import FORMS, RateSchedule, read_schedule
from coterie.core.steps import fold
from coterie.core.tree import Live, Tree
from coterie.core.validation import Explicit

P = TypeVar("P")  # any tree of weights


OWN = {  # settings of some optimizers only, with the value that means the default
    "momentum": 0.0,
    "nesterov": False,
    "beta1": None,
    "beta2": None,
    "eps": None,
}


@dataclass(frozen=True)
class LocalTraining(Explicit):
    """How a client trains in a round. `coterie.run` takes fields that are not set from the protocol."""

    local_epochs: int = field(
        default=5, metadata={"help": "epochs of local training per round", "short": ("ls",), "low": 0}
    )
    batch_size: int = field(default=50, metadata={"help": "samples per batch", "short": ("lbs",), "low": 1})
    optimizer: str = field(default="sgd", metadata={"help": f"optimizer: {', '.join(OPTIMIZERS)}"})
    lr: float = field(default=0.01, metadata={"help": "learning rate (adam, adamw: 0.001)", "low": 0})
    schedule: str = field(
        default="constant", metadata={"help": f"factor on the learning rate, over rounds or local steps: {FORMS}"}
    )
    momentum: float = field(default=0.0, metadata={"help": "momentum of sgd", "low": 0})
    nesterov: bool = field(default=False, metadata={"help": "Nesterov momentum of sgd"})
    beta1: float | None = field(
        default=None, metadata={"help": "decay of the first moment of adam and adamw (0.9)", "low": 0, "below": 1}
    )
    beta2: float | None = field(
        default=None, metadata={"help": "decay of the second moment of adam and adamw (0.999)", "low": 0, "below": 1}
    )
    eps: float | None = field(
        default=None,
        metadata={"help": "smallest divisor of adam and adamw (1e-8) and adagrad (1e-10)", "above": 0},
    )
    weight_decay: float = field(
        default=0.0, metadata={"help": "weight decay, on all that is trained (adamw: 0.01)", "low": 0}
    )
    drop_last: bool = field(default=False, metadata={"help": "skip the last batch of an epoch if it is smaller"})
    clip_gradient: float = field(default=0.0, metadata={"help": "largest norm of a gradient; 0: no limit", "low": 0})
    keep_momentum: bool = field(default=False, metadata={"help": "keep a client's optimizer state from round to round"})

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        read_schedule(self.schedule)
        kind = OPTIMIZERS[self.optimizer]
        taken = {f.name for f in fields(kind)}
        for name in OWN.keys() - taken:
            if getattr(self, name) != OWN[name]:
                known = ", ".join(n for n, one in OPTIMIZERS.items() if name in {f.name for f in fields(one)})
                raise CoterieError(f"{name} is not a setting of {self.optimizer}; it is one of {known}")
        for name in {"lr", "weight_decay"} - self.explicit:
            object.__setattr__(self, name, getattr(kind, name))

    def but(self, **changes: Any) -> Self:
        """A copy with these fields set to other values. Another optimizer brings its own default rates."""
        kind = OPTIMIZERS.get(changes.get("optimizer", self.optimizer))
        if kind is not None and changes.get("optimizer", self.optimizer) != self.optimizer:
            own = {"lr": kind.lr, "weight_decay": kind.weight_decay}
            changes = {name: value for name, value in own.items() if name not in self.explicit} | changes
        return super().but(**changes)

    def plain(self) -> Self:
        """The same with steps of gradient descent: no momentum, weight decay or clipping."""
        return self.but(**OWN, optimizer="sgd", lr=self.lr, weight_decay=0.0, clip_gradient=0.0)

    @property
    def tuned(self) -> frozenset[str]:
        """Settings that a protocol does not set for this optimizer: its values are for sgd."""
        return frozenset() if self.optimizer == "sgd" else frozenset({*OWN, "lr", "weight_decay"})

    @property
    def rates(self) -> RateSchedule:
        """The factors on the learning rate."""
        return read_schedule(self.schedule)

    @property
    def rule(self) -> Optimizer:
        """The optimizer with its settings."""
        kind = OPTIMIZERS[self.optimizer]
        given = {f.name: getattr(self, f.name) for f in fields(kind)}
        return kind(**{name: value for name, value in given.items() if value is not None})

    def start(self, params: object) -> Tree:
        """The optimizer state that a client begins with: empty, unless it is kept from round to round."""
        if not self.keep_momentum:
            return {}
        return self.rule.init({n: t for n, t in tree.items(params) if not tree.is_statistic(n)})

    def __call__(self, params: P, loss: Callable[[P, Batch], Tensor], data: Data, state: Tree) -> tuple[P, Tree]:
        """Trained params, and the optimizer state to keep."""

        def step(carry: tuple[P, Tree], batch: Batch) -> tuple[P, Tree]:
            return self.step(carry[0], loss, batch, data.rate, carry[1])

        params, state = fold((params, state), ((step, run) for run in self.runs(data)))
        return params, state if self.keep_momentum else {}

    def runs(self, data: Data) -> Iterator[Epoch]:
        """Shuffled batches, epoch by epoch."""
        n = len(data.y) if data.known is None else data.known
        full, rest = divmod(n, self.batch_size)
        for epoch in range(self.local_epochs):
            shuffled = random.shuffle(random.derive(data.key, random.SHUFFLE, epoch), len(data.y), data.real)[:n]
            drawn = data.batch(shuffled, epoch)._replace(partial=not self.drop_last)
            if data.known is not None:
                drawn = drawn._replace(real=None)
            if self.rates.local.varies:
                place = torch.arange(n, device=data.y.device).div(self.batch_size, rounding_mode="floor")
                drawn = drawn._replace(pace=self.pace(place, epoch, data))
            yield Epoch(drawn, self.batch_size, full, 0 if self.drop_last else rest)

    def pace(self, batch: Tensor, epoch: int, data: Data) -> Tensor:
        """Factors on the learning rate in batches 0, 1, ... of an epoch."""
        steps = self.steps(data.samples.double() if data.known is None else data.rate.new_tensor(data.known).double())
        step = epoch * steps / max(self.local_epochs, 1) + batch
        return self.rates.over_steps(step, steps).to(data.rate.dtype)

    def steps(self, samples: Tensor) -> Tensor:
        """Number of steps in a round of clients with this many samples."""
        batches = samples / self.batch_size
        return self.local_epochs * (batches.floor() if self.drop_last else batches.ceil())

    def step(
        self, params: P, loss: Callable[[P, Batch], Tensor], batch: Batch, rate: Tensor, state: Tree
    ) -> tuple[P, Tree]:
        """One step on one batch: the params after it, and the optimizer state."""
        flat = tree.flatten(params)
        weights = {n: t for n, t in flat.items() if not tree.is_statistic(n)}
        statistics = {n: t for n, t in flat.items() if tree.is_statistic(n)}
        slope, written = self.gradient(params, loss, batch, weights, statistics)
        active = batch.active
        moved, speed = self._descend(weights, state, slope, batch.paced(rate), active)
        if active is not None:
            written = tree.where(active, written, statistics)
        return tree.fill(params, moved | written), speed

    def gradient(
        self, params: P, loss: Callable[[P, Batch], Tensor], batch: Batch, weights: Tree, statistics: Tree
    ) -> tuple[Tree, Tree]:
        """Of the mean loss, in the weights; and BatchNorm's new statistics."""
        return gradient(objective(params, loss, batch), weights, statistics)

    def _descend(
        self, weights: Tree, state: Tree, slope: Tree, rate: Tensor, active: Tensor | None
    ) -> tuple[Tree, Tree]:
        """Weights and optimizer state after a step; a step of padding changes nothing."""
        if self.clip_gradient:
            norm = torch.stack([g.square().sum() for g in slope.values()]).sum().sqrt()
            slope = {n: g * (self.clip_gradient / (norm + 1e-6)).clamp_max(1) for n, g in slope.items()}
        return self.rule.step(weights, slope, state, rate, active)


def objective(params: P, loss: Callable[[P, Batch], Tensor], batch: Batch) -> Objective:
    """The mean loss of the real samples of a batch, as a function of weights, and BatchNorm's new statistics."""

    def mean_loss(weights: Tree, statistics: Tree) -> tuple[Tensor, Tree]:
        written = {n: t.clone() for n, t in statistics.items()}  # BatchNorm writes into these
        live = tree.fill(params, weights | written, leaf=Live)
        values = batch.give(lambda batch: loss(live, batch))
        if not isinstance(values, Tensor) or values.shape != batch.y.shape[:1] or not values.is_floating_point():
            raise wrong_loss(loss, values, len(batch.y))
        return batch.mean(values), written

    return mean_loss


def wrong_loss(loss: Callable[..., Any], values: Any, samples: int) -> CoterieError:
    """The error for a loss that is not (B,). It names the class and function that define the loss."""
    name = getattr(loss, "__qualname__", type(loss).__name__)
    where = ".".join(part for part in name.split(".") if not part.startswith("<"))
    got = type(values).__name__
    if isinstance(values, Tensor):
        got = f"shape {tuple(values.shape)}" if values.is_floating_point() else str(values.dtype)
    return CoterieError(
        f"{where}: the loss must have one value for each sample, shape ({samples},), got {got}; return the losses of "
        "the samples (reduction='none'), their mean is taken here, without padding"
    )
