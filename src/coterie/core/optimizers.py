"""Local training by stochastic gradient descent.

`Sgd` trains the tree that it is given. What must stay frozen is not in that tree: close over it. Losses are per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.core import ops, random, tree
from coterie.core.batch import Batch, Data, Epoch
from coterie.core.errors import CoterieError
from coterie.core.explicit import Explicit
from coterie.core.gradients import Objective, autograd_gradient, functional_gradient
from coterie.core.steps import fold
from coterie.core.tree import Live, Tree

P = TypeVar("P")  # any tree of weights


@dataclass(frozen=True)
class Sgd(Explicit):
    """Local training by stochastic gradient descent. `coterie.run` takes fields that are not set from the protocol."""

    local_epochs: int = field(default=5, metadata={"help": "epochs of local training per round", "short": ("ls",)})
    batch_size: int = field(default=50, metadata={"help": "samples per batch", "short": ("lbs",)})
    lr: float = field(default=0.01, metadata={"help": "learning rate"})
    momentum: float = field(default=0.0, metadata={"help": "momentum of SGD"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay, on all that is trained"})
    drop_last: bool = field(default=False, metadata={"help": "skip the last batch of an epoch if it is smaller"})
    clip_gradient: float = field(default=0.0, metadata={"help": "largest norm of a gradient; 0: no limit"})
    keep_momentum: bool = field(default=False, metadata={"help": "keep a client's momentum from round to round"})

    def __post_init__(self) -> None:
        for name in ("local_epochs", "batch_size", "lr", "momentum", "weight_decay", "clip_gradient"):
            low = int(name == "batch_size")
            if not low <= getattr(self, name) < math.inf:
                raise CoterieError(f"{name} must be at least {low} and finite, not {getattr(self, name)}")

    def start(self, params: object) -> Tree:
        """The momentum a client begins with: nothing, unless it is kept from round to round."""
        if not (self.keep_momentum and self.momentum):
            return {}
        return {n: torch.zeros_like(t) for n, t in tree.items(params) if not tree.is_statistic(n)}

    def __call__(self, params: P, loss: Callable[[P, Batch], Tensor], data: Data, momentum: Tree) -> tuple[P, Tree]:
        """Trained params, and the momentum to keep."""

        def step(carry: tuple[P, Tree], batch: Batch) -> tuple[P, Tree]:
            return self.step(carry[0], loss, batch, data.rate, carry[1])

        params, momentum = fold((params, momentum), ((step, run) for run in self.runs(data)))
        return params, momentum if self.keep_momentum else {}

    def runs(self, data: Data) -> Iterator[Epoch]:
        """Shuffled batches, epoch by epoch."""
        n = len(data.y) if data.known is None else data.known
        full, rest = divmod(n, self.batch_size)
        for epoch in range(self.local_epochs):
            shuffled = random.shuffle(random.fold(data.key, random.SHUFFLE, epoch), len(data.y), data.real)[:n]
            drawn = data.batch(shuffled, epoch)._replace(partial=not self.drop_last)
            if data.known is not None:
                drawn = drawn._replace(real=None)
            yield Epoch(drawn, self.batch_size, full, 0 if self.drop_last else rest)

    def step(
        self, params: P, loss: Callable[[P, Batch], Tensor], batch: Batch, rate: Tensor, momentum: Tree
    ) -> tuple[P, Tree]:
        """One step on one batch: the params after it, and the momentum."""
        flat = tree.flatten(params)
        weights = {n: t for n, t in flat.items() if not tree.is_statistic(n)}
        statistics = {n: t for n, t in flat.items() if tree.is_statistic(n)}
        slope, written = self.gradient(params, loss, batch, weights, statistics)
        active = batch.active
        moved, speed = self._descend(weights, momentum, slope, rate, active)
        if active is not None:
            written = tree.where(active, written, statistics)
        return tree.fill(params, moved | written), speed

    def gradient(
        self, params: P, loss: Callable[[P, Batch], Tensor], batch: Batch, weights: Tree, statistics: Tree
    ) -> tuple[Tree, Tree]:
        """Of the mean loss, in the weights; and BatchNorm's new statistics."""
        found = autograd_gradient if batch.alone else functional_gradient
        return found(objective(params, loss, batch), weights, statistics)

    def _descend(
        self, weights: Tree, velocity: Tree, slope: Tree, rate: Tensor, active: Tensor | None
    ) -> tuple[Tree, Tree]:
        """Weights and velocity after a step; a step of padding changes nothing."""
        if self.clip_gradient:
            norm = torch.stack([g.square().sum() for g in slope.values()]).sum().sqrt()
            slope = {n: g * (self.clip_gradient / (norm + 1e-6)).clamp_max(1) for n, g in slope.items()}
        names = list(weights)
        given = (list(weights.values()), [slope[n] for n in names], [velocity[n] for n in names] if velocity else [])
        scale = (self.lr, self.weight_decay, self.momentum)
        moved, speed = ops.current().sgd_step(*given, rate, active, *scale)
        return dict(zip(names, moved, strict=True)), dict(zip(names, speed, strict=True)) if self.momentum else {}


def objective(params: P, loss: Callable[[P, Batch], Tensor], batch: Batch) -> Objective:
    """The mean loss of the real samples of a batch, as a function of weights, and BatchNorm's new statistics."""

    def mean_loss(weights: Tree, statistics: Tree) -> tuple[Tensor, Tree]:
        written = {n: t.clone() for n, t in statistics.items()}  # BatchNorm writes into these
        live = tree.fill(params, weights | written, leaf=Live)
        values = batch.give(lambda batch: loss(live, batch))
        if not isinstance(values, Tensor) or values.shape != batch.y.shape or not values.is_floating_point():
            raise wrong_loss(loss, values, len(batch.y))
        return batch.mean(values), written

    return mean_loss


def wrong_loss(loss: Callable[..., Any], values: Any, samples: int) -> CoterieError:
    """The error for a loss that is not (B,). Its name: the method's class and function that it is written in."""
    name = getattr(loss, "__qualname__", type(loss).__name__)
    where = ".".join(part for part in name.split(".") if not part.startswith("<"))
    got = type(values).__name__
    if isinstance(values, Tensor):
        got = f"shape {tuple(values.shape)}" if values.is_floating_point() else str(values.dtype)
    return CoterieError(
        f"{where}: the loss must have one value for each sample, shape ({samples},), got {got}; return the losses of "
        "the samples (reduction='none'), their mean is taken here, without padding"
    )
