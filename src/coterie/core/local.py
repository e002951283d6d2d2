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

from coterie.core import fused, mean_loss, order, padding, stacks, tree
from coterie.core.errors import CoterieError
from coterie.core.gradients import Objective, functional_gradient, tape_gradient
from coterie.core.losses import cross_entropy
from coterie.core.model import Model, Weights
from coterie.core.replay import fold
from coterie.core.samples import Transform
from coterie.core.tree import Live, Tree

P = TypeVar("P")  # any tree of weights

TEST_BATCH = 128  # samples of one forward pass without training


class Batch(NamedTuple):
    x: Tensor  # (B, ...) raw, augmented
    y: Tensor  # (B,)
    sample: Tensor  # (B,) which samples of the client these are
    real: Tensor | None = None  # (B,) False where a sample is padding; None: all are real
    partial: bool = True  # whether a batch that is not full counts
    alone: bool = False  # computed on its own, not side by side with other clients
    expected: Tensor | None = None  # () how many are real on average, where they are drawn so; 0: a step of padding
    key: Tensor | None = None  # () randomness of this step, where it has any

    def part(self, rows: slice | Tensor) -> Batch:
        real = None if self.real is None else self.real[rows]
        return self._replace(x=self.x[rows], y=self.y[rows], sample=self.sample[rows], real=real)

    @property
    def active(self) -> Tensor | None:
        """() False: this step is padding and must change nothing; None: it counts."""
        if self.expected is not None:
            return self.expected > 0
        if self.real is None:
            return None
        return self.real.any() if self.partial else self.real.all()

    def give(self, f: Callable[[Batch], Tensor]) -> Tensor:
        """f of this batch, whose padding no network sees."""
        with padding.known(self.real if self.partial else None):  # else it is full, or counts for nothing
            return f(self)

    def mean(self, values: Tensor) -> Tensor:
        """Over the real samples of (B,) values."""
        if self.real is None:
            return values.mean()
        if stacks.side_by_side(values):
            return mean_loss.mean(values.expand_as(self.real), self.real)
        return torch.where(self.real, values, 0.0).sum() / self.real.sum().clamp_min(1)


@dataclass(frozen=True)
class Epoch:
    """Batches of one epoch: see replay.Run."""

    drawn: Batch  # (n, ...) all samples, in the order of this epoch
    size: int  # samples of a batch
    full: int  # batches of this size
    rest: int  # samples of one more, smaller batch; 0: there is none

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.full * self.size, self.size):
            yield self.drawn.part(slice(start, start + self.size))
        if self.rest:
            yield self.last()

    def at(self, place: Tensor) -> Batch:
        return self.drawn.part(place + torch.arange(self.size, device=place.device))

    def last(self) -> Batch:
        return self.drawn.part(slice(self.full * self.size, self.full * self.size + self.rest))

    @property
    def alone(self) -> bool:
        return self.drawn.alone

    @property
    def tensors(self) -> Tree:
        return {name: value for name, value in self.drawn._asdict().items() if isinstance(value, Tensor)}

    def having(self, tensors: Tree) -> Epoch:
        return replace(self, drawn=self.drawn._replace(**tensors))  # type: ignore[arg-type]


def draw(x: Tensor, index: Tensor, bits: Tensor, transform: Transform) -> Tensor:
    """The samples of an index (B,), images varied by their random bits (B,)."""
    if stacks.usable(x.device) and x.ndim == 4:
        drawn: Tensor = stacks.call(fused.Drawn, x[None], index[None], bits[None], transform.crop, transform.flip)
        return drawn[0]
    return augment(x[index], bits, transform) if transform.crop or transform.flip else x[index]


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
    alone: bool = False  # computed on its own, not side by side with other clients
    known: int | None = None  # how many are real, where all clients side by side have as many: no batch is padded then

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

    def mean(self, values: Tensor) -> Tensor:
        """Over the real samples, of (n,) or (n, ...) values."""
        if self.real is None:
            return values.mean(0)
        real = self.real.view(-1, *[1] * (values.ndim - 1))
        return torch.where(real, values, 0.0).sum(0) / self.samples

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """These samples as training sees them in this epoch."""
        bits = order.bits(order.fold(self.key, order.AUGMENT, epoch), index)
        x = draw(self.x, index, bits, self.transform)
        real = None if self.real is None else self.real[index]
        return Batch(x, self.y[index], index, real, alone=self.alone)

    def of(self, z: Tensor) -> Data:
        """The same samples, known by their features (n, d)."""
        return replace(self, x=z, transform=Transform())

    def split(self, share: float) -> tuple[Data, Data]:
        """A random share of the samples, at least one, and the others. The same in every round only if the key is."""
        n, most = len(self.y), max(int(share * len(self.y)), 1)
        shuffled = order.shuffle(order.fold(self.key, order.SPLIT), n, self.real)  # the real ones first
        part = replace(self, x=self.x[shuffled[:most]], y=self.y[shuffled[:most]], known=None)
        if self.real is None:
            return part, replace(self, real=shuffled.argsort() >= most, known=n - most)
        size = (share * self.samples.double()).floor().clamp_min(1)
        rank = torch.arange(most, device=self.y.device)
        others = self.real & (shuffled.argsort() >= size)
        return replace(part, real=rank < size), replace(self, real=others, known=None)

    def in_parts(self, f: Callable[[Batch], Tensor], epoch: int = 0) -> Tensor:
        """(n, ...) f of all samples in their own order, so many at a time as in testing, without gradients."""
        everything = self.batch(torch.arange(len(self.y), device=self.y.device), epoch)
        parts = (everything.part(slice(start, start + TEST_BATCH)) for start in range(0, len(self.y), TEST_BATCH))
        with torch.no_grad():
            return torch.cat([part.give(f) for part in parts])


def features(model: Model, encoder: Tree, data: Data, epoch: int = 0) -> Tensor:
    """(n, d) features of all samples, as training sees them in this epoch."""
    return data.in_parts(lambda batch: model.features(encoder, batch.x), epoch)


def sample_losses(model: Model, weights: Weights, data: Data) -> Tensor:
    """(n,) cross entropy of all samples as they are, not as training varies them."""
    plain = replace(data, transform=Transform())
    return plain.in_parts(lambda batch: cross_entropy(model(weights, batch.x), batch.y))


def each(one: Callable[..., P], rows: tuple[Any, ...], data: Data) -> P:
    """one(*row) for every row of trees with a leading axis, as of a client's several models; the results stacked.

    They are computed as clients are: side by side, or one after the other where a client is computed alone.
    """
    if not data.alone:
        return torch.func.vmap(one)(*rows)
    count = len(tree.leaves(rows)[0])
    return tree.stack([one(*tree.pick(rows, row)) for row in range(count)])


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
    clip: float = field(
        default=0.0, metadata={"help": "largest norm of a gradient; 0: any", "flags": ("clip-gradient",)}
    )
    keep: bool = field(
        default=False, metadata={"help": "momentum survives from round to round", "flags": ("keep-momentum",)}
    )

    def __post_init__(self) -> None:
        for name, low in (("epochs", 0), ("batch", 1), ("lr", 0), ("momentum", 0), ("weight_decay", 0), ("clip", 0)):
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

        def step(carry: tuple[P, Tree], batch: Batch) -> tuple[P, Tree]:
            return self.step(carry[0], loss, batch, data.rate, carry[1])

        params, momentum = fold((params, momentum), ((step, run) for run in self.runs(data)))
        return params, momentum if self.keep else {}

    def runs(self, data: Data) -> Iterator[Epoch]:
        """Shuffled batches, epoch by epoch."""
        n = len(data.y) if data.known is None else data.known
        full, rest = divmod(n, self.batch)
        for epoch in range(self.epochs):
            shuffled = order.shuffle(order.fold(data.key, order.SHUFFLE, epoch), len(data.y), data.real)[:n]
            drawn = data.batch(shuffled, epoch)._replace(partial=not self.drop_last)
            if data.known is not None:
                drawn = drawn._replace(real=None)
            yield Epoch(drawn, self.batch, full, 0 if self.drop_last else rest)

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
        found = tape_gradient if batch.alone else functional_gradient
        return found(objective(params, loss, batch), weights, statistics)

    def _descend(
        self, weights: Tree, velocity: Tree, slope: Tree, rate: Tensor, active: Tensor | None
    ) -> tuple[Tree, Tree]:
        """Weights and velocity after a step; a step of padding changes nothing."""
        if self.clip:
            norm = torch.stack([g.square().sum() for g in slope.values()]).sum().sqrt()
            slope = {n: g * (self.clip / (norm + 1e-6)).clamp_max(1) for n, g in slope.items()}
        if stacks.usable(rate.device):
            return self._descend_fused(weights, velocity, slope, rate, active)
        lr, moved, speed = self.lr * rate, {}, {}
        for name, w in weights.items():
            g = slope[name]
            if self.weight_decay:
                g = g.add(w, alpha=self.weight_decay)
            if self.momentum and velocity:
                g = g.add(velocity[name], alpha=self.momentum)
            if self.momentum:
                speed[name] = g
            moved[name] = w.addcmul(g, lr, value=-1)
        if active is None:
            return moved, speed
        before = velocity or {n: torch.zeros_like(t) for n, t in speed.items()}
        return tree.where(active, moved, weights), tree.where(active, speed, before)

    def _descend_fused(
        self, weights: Tree, velocity: Tree, slope: Tree, rate: Tensor, active: Tensor | None
    ) -> tuple[Tree, Tree]:
        names = list(weights)
        last = [velocity[n] for n in names] if self.momentum and velocity else []
        given = (*weights.values(), *(slope[n] for n in names), *last)
        step = (rate, active, self.lr, self.weight_decay, self.momentum, len(names))
        made = stacks.call(fused.Descent, *step, *given) if names else ()
        speed = dict(zip(names, made[len(names) :], strict=True)) if self.momentum else {}
        return dict(zip(names, made[: len(names)], strict=True)), speed


def objective(params: P, loss: Callable[[P, Batch], Tensor], batch: Batch) -> Objective:
    """The mean loss of the real samples of a batch, as a function of weights; beside it, BatchNorm's new statistics."""

    def mean_loss(weights: Tree, statistics: Tree) -> tuple[Tensor, Tree]:
        written = {n: t.clone() for n, t in statistics.items()}  # BatchNorm writes into these
        live = tree.fill(params, weights | written, leaf=Live)
        return batch.mean(batch.give(lambda batch: loss(live, batch))), written  # (B,)

    return mean_loss
