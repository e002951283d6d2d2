"""The data of a federation: the samples of all clients, client after client."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import CoterieError, some_of
from coterie.core.packing import Input
from coterie.core.task import Classification, Task

VALUE, MISSING = -1, -2  # kinds of network inputs from a column: its value, whether it is missing; others: a category


@dataclass(frozen=True, repr=False)
class Split:
    """One split (train, test or validation) of every client."""

    x: Tensor  # (N, ...) raw: uint8 images (N, C, H, W), float features (N, F), int64 tokens (N, T), packed inputs
    y: Tensor  # (N, ...) labels of the task; (N,) int64 for classes
    sizes: tuple[int, ...]  # samples of client 0, 1, ..., which sum to N
    group: Tensor | None = None  # (N,) int64: samples of one group (patient, recording) stay on one side of a split

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.sizes))

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        start = self.starts[i]
        return self.x[start : start + self.sizes[i]], self.y[start : start + self.sizes[i]]

    def ranges(self) -> list[slice]:
        """The slice of each client's samples."""
        return [slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=False)]

    def pick(self, clients: Sequence[int]) -> Split:
        """These clients only, in this order."""
        ranges = self.ranges()

        def of(values: Tensor) -> Tensor:
            return torch.cat([values[ranges[i]] for i in clients])

        group = None if self.group is None else of(self.group)
        return Split(of(self.x), of(self.y), tuple(self.sizes[i] for i in clients), group)

    def owners(self) -> Tensor:
        """(N,) the client each sample belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))

    def class_counts(self, classes: int) -> Tensor:
        """(m, K) samples of every class on every client."""
        counts = torch.zeros(len(self.sizes), classes, dtype=torch.int64)
        if not classes:
            return counts
        return counts.index_put_((self.owners(), self.y), torch.tensor(1), accumulate=True)

    def __repr__(self) -> str:
        return f"Split({self.summary()})"

    def summary(self) -> str:
        """Such as: 3,000 samples, 150 per client."""
        low, high = min(self.sizes, default=0), max(self.sizes, default=0)
        each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"{sum(self.sizes):,} samples, {each} per client"


def is_pixels(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether raw samples of this shape are images of 0..255, which a model scales to 0..1."""
    return dtype == torch.uint8 and len(shape) >= 3


@dataclass(frozen=True)
class Column:
    """One column of a table, and how it becomes inputs of a network."""

    name: str
    categories: tuple[
        str, ...
    ] = ()  # of text: a raw sample holds the index in this list; one network input per category
    fill: float | None = None  # replaces missing values; None: missing values are an error
    indicator: bool = False  # whether one more input says that the value was missing

    @property
    def plain(self) -> bool:
        """Whether the raw value is the only input."""
        return not self.categories and self.fill is None and not self.indicator

    @property
    def inputs(self) -> tuple[int, ...]:
        """What each input holds: VALUE, MISSING, or the position of a category."""
        values = range(len(self.categories)) if self.categories else (VALUE,)
        return (*values, *((MISSING,) if self.indicator else ()))


@dataclass(frozen=True)
class Transform:
    """How raw samples become the input of a model, and how they are augmented in training."""

    mean: tuple[float, ...] = ()  # per channel, of pixels scaled to 0..1; empty: use the values as they are
    std: tuple[float, ...] = ()
    crop: int = 0  # training: random crop after padding by this many pixels
    flip: bool = False  # training: random horizontal flip
    axis: int = 0  # channel axis of a sample: 0 for images (C, H, W), 1 for series (T, F)
    columns: tuple[Column, ...] = ()  # of a table, in the order of a raw sample; empty: samples are arrays
    inputs: tuple[Input, ...] = ()  # of samples with several inputs, which are packed in this order; empty: one input
    padding: float | None = None  # fills sequences of different lengths at the end; None: they are not filled

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Transform:
        """From the JSON of `asdict(transform)`."""
        tuples = _with_tuples(content)
        columns = tuple(Column(**_with_tuples(column)) for column in content["columns"])
        inputs = tuple(Input(**_with_tuples(one)) for one in content.get("inputs", ()))
        return Transform(**{**tuples, "columns": columns, "inputs": inputs})

    def input_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the network's input for a raw sample of this shape."""
        return (sum(len(column.inputs) for column in self.columns),) if self.columns else shape


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


@dataclass(frozen=True, repr=False)
class FederatedData:
    """The data of a federation: training and test samples of every client. Client i is row i of every split."""

    name: str
    classes: int  # K, if every sample has one class; otherwise 0
    train: Split
    test: Split
    validation: Split | None = None
    transform: Transform = Transform()
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()  # empty: clients have numbers only
    partition: Any = None  # how samples were assigned to clients, if Coterie did it
    task: Task = None  # type: ignore[assignment]  # default: classification

    def __post_init__(self) -> None:
        if self.task is None:
            object.__setattr__(self, "task", Classification(self.classes))
        elif self.task.one_class != bool(self.classes):
            raise CoterieError(f"data for {self.task.name} cannot have {self.classes} classes")

    @property
    def num_clients(self) -> int:
        return len(self.train.sizes)

    def pick(self, clients: Sequence[int]) -> FederatedData:
        """These clients only, numbered from 0."""
        held_out = None if self.validation is None else self.validation.pick(clients)
        names = tuple(self.client_names[i] for i in clients) if self.client_names else ()
        train, test = self.train.pick(clients), self.test.pick(clients)
        return replace(self, train=train, test=test, validation=held_out, client_names=names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train.x.shape[1:])

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of one label."""
        return tuple(self.train.y.shape[1:])

    def __repr__(self) -> str:
        held = "" if self.validation is None else f"\n  validation: {self.validation.summary()}"
        named = f" ({some_of(self.client_names)})" if self.client_names else ""
        classes = f" ({some_of(self.class_names)})" if self.class_names else ""
        goal = f"{self.classes} classes{classes}" if self.classes else f"{self.task.described()}{classes}"
        one = f"shape {self.shape}, {str(self.train.x.dtype).removeprefix('torch.')}"
        network = self.transform.input_shape(self.shape)
        one += f"; {network[0]} inputs of the network" if self.transform.columns and network != self.shape else ""
        return (
            f"FederatedData {self.name}: {self.num_clients} clients{named}, {goal}\n"
            f"  train: {self.train.summary()}\n"
            f"  test: {self.test.summary()}{held}\n"
            f"  sample: {', '.join(map(str, self.transform.inputs)) or one}"
        )
