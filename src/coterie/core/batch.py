"""One client's data and batches of it. Means are over real samples, so methods never see padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import dropout, ops, padding, random, tree
from coterie.core.data import Transform
from coterie.core.model import Model, Weights
from coterie.core.tree import Tree

P = TypeVar("P")  # any tree of weights

TEST_BATCH = 128  # samples of a forward pass without training


class Batch(NamedTuple):
    x: Tensor  # (B, ...) raw, augmented
    y: Tensor  # (B, ...) labels; (B,) for classes
    sample: Tensor  # (B,) indices of these samples in the client's data
    real: Tensor | None = None  # (B,) False where a sample is padding; None: all are real
    partial: bool = True  # whether an incomplete batch counts
    alone: bool = False  # computed alone, not stacked with other clients
    expected: Tensor | None = None  # () expected number of real samples under Poisson sampling; 0: a step of padding
    key: Tensor | None = None  # () random key of client, round and epoch, for dropout
    noise_key: Tensor | None = None  # () random key of this step's noise, in private training
    pace: Tensor | None = None  # (B,) factor on the learning rate in the step of each sample; None: 1

    def part(self, rows: slice | Tensor) -> Batch:
        real = None if self.real is None else self.real[rows]
        pace = None if self.pace is None else self.pace[rows]
        return self._replace(x=self.x[rows], y=self.y[rows], sample=self.sample[rows], real=real, pace=pace)

    def paced(self, rate: Tensor) -> Tensor:
        """() a rate of the round, in this step."""
        return rate if self.pace is None else rate * self.pace[0]

    @property
    def active(self) -> Tensor | None:
        """() False: this step is padding and must change nothing; None: it counts."""
        if self.expected is not None:
            return self.expected > 0
        if self.real is None:
            return None
        return self.real.any() if self.partial else self.real.all()

    def give(self, f: Callable[[Batch], Tensor]) -> Tensor:
        """f(batch), where layers know which samples are padding, and what dropout draws."""
        real = self.real if self.partial else None  # otherwise the batch is complete or does not count
        with padding.known(real), dropout.known(self.key, self.sample):
            return f(self)

    def mean(self, values: Tensor) -> Tensor:
        """() mean of values (B,) over the real samples."""
        if self.real is None:
            return values.mean()
        return ops.current().masked_mean(values.expand_as(self.real), self.real)


@dataclass(frozen=True)
class Epoch:
    """Batches of one epoch; a `steps.Steps`."""

    drawn: Batch  # (n, ...) all samples, in the order of this epoch
    size: int  # samples of a batch
    full: int  # batches of this size
    rest: int  # samples of a last, smaller batch; 0: none

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


@dataclass(frozen=True)
class Data:
    """What one client holds, in one round."""

    x: Tensor  # (n, ...) raw samples
    y: Tensor  # (n, ...) labels; (n,) for classes
    key: Tensor  # () random key of this client in this round
    rate: Tensor  # () factor on the learning rate in this round
    classes: int  # K, if every sample has one class; otherwise 0
    transform: Transform
    real: Tensor | None = None  # (n,) False where a sample is padding; None: all are real
    alone: bool = False  # computed alone, not stacked with other clients
    draws: bool = True  # whether the network draws from the keys of batches
    known: int | None = None  # number of real samples, if it is the same for all stacked clients: no batch is padded

    @property
    def samples(self) -> Tensor:
        """() number of real samples, as a tensor that can be sent."""
        if self.real is None:
            return torch.full((), len(self.y), dtype=self.rate.dtype, device=self.y.device)
        return self.real.sum().to(self.rate.dtype)

    @property
    def counts(self) -> Tensor:
        """(K,) samples of every class."""
        if not self.classes:
            return self.rate.new_zeros(0)
        member = F.one_hot(self.y, self.classes)
        if self.real is not None:
            member = member * self.real[:, None]
        return member.sum(0).to(self.rate.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values (n, ...) over the real samples."""
        if self.real is None:
            return values.mean(0)
        real = self.real.view(-1, *[1] * (values.ndim - 1))
        return torch.where(real, values, 0.0).sum(0) / self.samples

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """These samples, augmented as in this epoch."""
        varied = self.transform.crop or self.transform.flip
        bits = random.bits(random.derive(self.key, random.AUGMENT, epoch), index) if varied else index  # not read
        x = ops.current().draw(self.x, index, bits, self.transform)
        real = None if self.real is None else self.real[index]
        key = random.derive(self.key, random.DROPOUT, epoch) if self.draws else None
        return Batch(x, self.y[index], index, real, alone=self.alone, key=key)

    def of(self, z: Tensor) -> Data:
        """The same samples with features (n, d) as inputs."""
        return replace(self, x=z, transform=Transform())

    def split(self, share: float) -> tuple[Data, Data]:
        """A random share of the samples, at least one, and the rest. Equal keys give equal splits."""
        n, most = len(self.y), max(int(share * len(self.y)), 1)
        shuffled = random.shuffle(random.derive(self.key, random.SPLIT), n, self.real)  # the real ones first
        part = replace(self, x=self.x[shuffled[:most]], y=self.y[shuffled[:most]], known=None)
        if self.real is None:
            return part, replace(self, real=shuffled.argsort() >= most, known=n - most)
        size = (share * self.samples.double()).floor().clamp_min(1)
        rank = torch.arange(most, device=self.y.device)
        others = self.real & (shuffled.argsort() >= size)
        return replace(part, real=rank < size), replace(self, real=others, known=None)

    def in_parts(self, f: Callable[[Batch], Tensor], epoch: int = 0) -> Tensor:
        """(n, ...): f of all samples in order, in test-size batches and without gradients."""
        everything = self.batch(torch.arange(len(self.y), device=self.y.device), epoch)
        parts = (everything.part(slice(start, start + TEST_BATCH)) for start in range(0, len(self.y), TEST_BATCH))
        with torch.no_grad():
            return torch.cat([part.give(f) for part in parts])


def features(model: Model, encoder: Tree, data: Data, epoch: int = 0) -> Tensor:
    """(n, d) features of all samples, augmented as in this epoch."""
    return data.in_parts(lambda batch: model.features(encoder, batch.x), epoch)


def sample_losses(model: Model, weights: Weights, data: Data) -> Tensor:
    """(n,) the loss of every sample, without augmentation."""
    plain = replace(data, transform=Transform())
    return plain.in_parts(lambda batch: model.loss(model(weights, batch.x), batch))


def each(one: Callable[..., P], rows: tuple[Any, ...], data: Data) -> P:
    """one(*row) for every row of trees with a leading axis, such as the several models of a client; results stacked.

    Under vmap if clients are stacked, in a loop if the client is computed alone.
    """
    if not data.alone:
        return torch.func.vmap(one)(*rows)
    count = len(tree.leaves(rows)[0])
    return tree.stack([one(*tree.pick(rows, row)) for row in range(count)])
