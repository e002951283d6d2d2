"""Training on one client: its data, batches of them, and stochastic gradient descent.

`sgd` trains the tree that it is given. What must stay frozen is simply not in that tree: close over it.
Losses are per sample; the mean over a batch is taken here, so a method never meets padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import order, tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.samples import Transform
from coterie.core.tree import Live, Tree

P = TypeVar("P")  # any tree of weights

TEST_BATCH = 128  # samples of one forward pass without training


class Batch(NamedTuple):
    x: Tensor  # (B, ...) raw, augmented
    y: Tensor  # (B,)
    sample: Tensor  # (B,) which samples of the client these are


@dataclass(frozen=True)
class Data:
    """What one client holds, in one round."""

    x: Tensor  # (n, ...) raw samples
    y: Tensor  # (n,)
    key: Tensor  # () randomness of this client in this round
    rate: Tensor  # () factor on the learning rate in this round
    classes: int
    transform: Transform
    real: Tensor | None = None  # (n,) False where a sample is padding; None: all are real

    @property
    def samples(self) -> Tensor:
        """() how many samples, as a number that can travel."""
        if self.real is None:
            return torch.full((), len(self.y), dtype=self.rate.dtype, device=self.y.device)
        return self.real.sum().to(self.rate.dtype)

    @property
    def counts(self) -> Tensor:
        """(K,) samples of every class."""
        member = F.one_hot(self.y, self.classes)
        if self.real is not None:
            member = member * self.real[:, None]
        return member.sum(0).to(self.rate.dtype)

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """These samples as training sees them in this epoch."""
        x = self.x[index]
        if self.transform.crop or self.transform.flip:
            x = augment(x, order.bits(order.fold(self.key, order.AUGMENT, epoch), index), self.transform)
        return Batch(x, self.y[index], index)

    def of(self, z: Tensor) -> Data:
        """The same samples, known by their features (n, d)."""
        return replace(self, x=z, transform=Transform())

    def batches(self, epoch: int, size: int) -> Iterator[Batch]:
        """All samples in their own order, `size` at a time."""
        everything = torch.arange(len(self.y), device=self.y.device)
        for start in range(0, len(self.y), size):
            yield self.batch(everything[start : start + size], epoch)


def augment(x: Tensor, draws: Tensor, transform: Transform) -> Tensor:
    """Random crop and flip of images (B, C, H, W), from random bits (B,)."""
    height, width = x.shape[2:]
    pad, span = transform.crop, 2 * transform.crop + 1
    down, right, mirrored = draws % span, (draws >> 20) % span, (draws >> 40) & 1
    rows = torch.arange(height, device=x.device) + down[:, None]  # (B, H)
    columns = torch.arange(width, device=x.device)
    if transform.flip:
        columns = torch.where(mirrored[:, None] == 1, columns.flip(0), columns)
    columns = columns + right[:, None]  # (B, W)
    sample = torch.arange(len(x), device=x.device)[:, None, None]
    pixels = F.pad(x, (pad, pad, pad, pad)).movedim(1, 3)  # (B, H + 2 pad, W + 2 pad, C)
    return pixels[sample, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


def features(model: Model, encoder: Tree, data: Data, epoch: int = 0) -> Tensor:
    """(n, d) features of all samples, as training sees them in this epoch."""
    with torch.no_grad():
        return torch.cat([model.features(encoder, batch.x) for batch in data.batches(epoch, TEST_BATCH)])


@dataclass(frozen=True)
class Sgd:
    """Local training by stochastic gradient descent."""

    epochs: int = field(
        default=5, metadata={"help": "epochs of local training in a round", "flags": ("local-epochs", "ls")}
    )
    batch: int = field(default=50, metadata={"help": "samples of a mini-batch", "flags": ("batch-size", "lbs")})
    lr: float = field(default=0.01, metadata={"help": "learning rate"})
    momentum: float = field(default=0.0, metadata={"help": "momentum of SGD"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay, on all that is trained"})
    drop_last: bool = field(default=False, metadata={"help": "skip the last batch of an epoch if it is smaller"})
    keep: bool = field(
        default=False, metadata={"help": "momentum survives from round to round", "flags": ("keep-momentum",)}
    )

    def __post_init__(self) -> None:
        for name, low in (("epochs", 0), ("batch", 1), ("lr", 0), ("momentum", 0), ("weight_decay", 0)):
            if not getattr(self, name) >= low:
                raise CoterieError(f"{name.replace('_', ' ')} must be at least {low}, not {getattr(self, name)}")

    def but(self, **changes: Any) -> Sgd:
        return replace(self, **changes)

    def start(self, params: object) -> Tree:
        """The momentum a client begins with: nothing, unless it is kept from round to round."""
        if not (self.keep and self.momentum):
            return {}
        return {n: torch.zeros_like(t) for n, t in tree.items(params) if not tree.is_statistic(n)}

    def __call__(self, params: P, loss: Callable[[P, Batch], Tensor], data: Data, momentum: Tree) -> tuple[P, Tree]:
        """Trained params, and the momentum to keep."""
        gradient = torch.func.grad(self._objective(params, loss), has_aux=True)
        flat = tree.flatten(params)
        weights = {n: t for n, t in flat.items() if not tree.is_statistic(n)}
        statistics = {n: t for n, t in flat.items() if tree.is_statistic(n)}
        velocity = momentum
        for batch, real in self._steps(data):
            slope, written = gradient(weights, statistics, batch, real)
            moved, speed = self._step(weights, velocity, slope, self.lr * data.rate)
            if real is not None:  # a step of padding changes nothing
                active = real.all() if self.drop_last else real.any()
                moved, written = tree.where(active, moved, weights), tree.where(active, written, statistics)
                speed = tree.where(active, speed, velocity or {n: torch.zeros_like(s) for n, s in speed.items()})
            weights, statistics, velocity = moved, written, speed
        kept = velocity if self.keep and self.momentum else {}
        return tree.fill(params, weights | statistics), kept

    def _objective(self, params: P, loss: Callable[[P, Batch], Tensor]) -> Callable[..., tuple[Tensor, Tree]]:
        def objective(weights: Tree, statistics: Tree, batch: Batch, real: Tensor | None) -> tuple[Tensor, Tree]:
            written = {n: t.clone() for n, t in statistics.items()}  # BatchNorm writes into these
            losses = loss(tree.fill(params, weights | written, leaf=Live), batch)  # (B,)
            if real is None:
                return losses.mean(), written
            return (losses * real).sum() / real.sum().clamp_min(1), written

        return objective

    def _step(self, weights: Tree, velocity: Tree, slope: Tree, lr: Tensor) -> tuple[Tree, Tree]:
        moved, speed = {}, {}
        for name, w in weights.items():
            g = slope[name]
            if self.weight_decay:
                g = g + self.weight_decay * w
            if self.momentum and velocity:
                g = g + self.momentum * velocity[name]
            if self.momentum:
                speed[name] = g
            moved[name] = w - lr * g
        return moved, speed

    def _steps(self, data: Data) -> Iterator[tuple[Batch, Tensor | None]]:
        """Shuffled batches of all epochs; beside each, which of its samples are real (None: all)."""
        n = len(data.y)
        for epoch in range(self.epochs):
            shuffled = order.shuffle(order.fold(data.key, order.SHUFFLE, epoch), n, data.real)
            for start in range(0, n - self.batch + 1 if self.drop_last else n, self.batch):
                index = shuffled[start : start + self.batch]
                yield data.batch(index, epoch), None if data.real is None else data.real[index]
