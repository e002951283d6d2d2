"""What the clients hold: the samples of all clients, kept one client after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """One split (train, test or validation) of every client."""

    x: Tensor  # (N, ...) raw: uint8 images (N, C, H, W), or float features (N, F)
    y: Tensor  # (N,) int64
    sizes: tuple[int, ...]  # samples of client 0, 1, ...; they sum to N

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.sizes))

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        start = self.starts[i]
        return self.x[start : start + self.sizes[i]], self.y[start : start + self.sizes[i]]

    def ranges(self) -> list[slice]:
        """Where each client's samples are."""
        return [slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=False)]

    def pick(self, clients: Sequence[int]) -> Split:
        """These clients only, in this order."""
        ranges = self.ranges()
        x, y = (torch.cat([values[ranges[i]] for i in clients]) for values in (self.x, self.y))
        return Split(x, y, tuple(self.sizes[i] for i in clients))

    def owners(self) -> Tensor:
        """(N,) the client each sample belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))

    def class_counts(self, classes: int) -> Tensor:
        """(m, K) samples of every class on every client."""
        counts = torch.zeros(len(self.sizes), classes, dtype=torch.int64)
        return counts.index_put_((self.owners(), self.y), torch.tensor(1), accumulate=True)


@dataclass(frozen=True)
class Transform:
    """How raw samples become the input of a model, and how training varies them."""

    mean: tuple[float, ...] = ()  # per channel, of pixels scaled to 0..1; empty: use the values as they are
    std: tuple[float, ...] = ()
    crop: int = 0  # training: random crop after padding by this many pixels
    flip: bool = False  # training: random horizontal flip


@dataclass(frozen=True)
class FederatedData:
    """The data of a federation. Client i is row i of every split."""

    name: str
    classes: int
    train: Split
    test: Split
    validation: Split | None = None
    transform: Transform = Transform()
    class_names: tuple[str, ...] = ()
    partition: Any = None  # how the samples came to the clients, where that was our doing

    @property
    def clients(self) -> int:
        return len(self.train.sizes)

    def pick(self, clients: Sequence[int]) -> FederatedData:
        """These clients only, numbered anew."""
        held_out = None if self.validation is None else self.validation.pick(clients)
        return replace(self, train=self.train.pick(clients), test=self.test.pick(clients), validation=held_out)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train.x.shape[1:])
