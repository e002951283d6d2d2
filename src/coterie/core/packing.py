"""Samples with several inputs: packed into one row of bytes each, and unpacked right before the network.

Bytes hold every type exactly and need no more memory than the inputs do. Whatever handles samples between a user's data
and the network (splits, batches, back ends, checkpoints) handles one tensor, as for samples with one input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import unknown

TYPES = {
    name: getattr(torch, name) for name in ("bool", "uint8", "int64", "float16", "float32")
}  # that an input can have

Inputs = Tensor | dict[str, Tensor]  # what a network is given: a tensor (B, ...), or several by name


@dataclass(frozen=True)
class Input:
    """One of several inputs: a part of every sample, by name."""

    name: str
    shape: tuple[int, ...]  # of one sample; (): one number
    dtype: str  # one of TYPES
    mean: tuple[float, ...] = ()  # per channel, as in Transform
    std: tuple[float, ...] = ()
    axis: int = 0  # channel axis of one sample
    padding: float | None = None  # fills sequences of different lengths at the end; None: they are not filled

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise unknown("type of an input", self.dtype, TYPES)

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = TYPES[self.dtype]
        return found

    @property
    def size(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * self.type.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype}"


def names(inputs: Sequence[Input]) -> str:
    return ", ".join(one.name for one in inputs)


def width(inputs: Sequence[Input]) -> int:
    """Bytes of one sample of all inputs."""
    return sum(one.size for one in inputs)


def pack(inputs: Sequence[Input], given: Mapping[str, Tensor]) -> Tensor:
    """Inputs (B, ...) of the types that `inputs` names -> (B, bytes) uint8."""
    rows = [(t := given[one.name].to(one.type).contiguous()).view(len(t), math.prod(one.shape)) for one in inputs]
    return torch.cat([row.view(torch.uint8) for row in rows], 1)


def unpack(inputs: Sequence[Input], x: Tensor) -> dict[str, Tensor]:
    """(B, bytes) uint8 -> inputs (B, ...), by name."""
    parts = torch.split(x, [one.size for one in inputs], 1)
    own = ((one, part.clone(memory_format=torch.contiguous_format)) for one, part in zip(inputs, parts, strict=True))
    return {one.name: reinterpreted(part, one.type).view(len(x), *one.shape) for one, part in own}  # a copy is aligned


def reinterpreted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of x as numbers of another type, as x.view(dtype); also under vmap."""
    made: Tensor = _Reinterpreted.apply(x, dtype)  # type: ignore[no-untyped-call]
    return made


class _Reinterpreted(torch.autograd.Function):
    """x.view(dtype) with the rule for vmap that torch 2.11 does not have. It has no gradient."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is needed in the backward pass."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return reinterpreted(x.movedim(in_dims[0], 0).contiguous(), dtype), 0


def mixed(bits: Tensor) -> Tensor:
    """Zeros and ones (B, ..., T) with a one at the start and a zero at the end of every row.

    So a mask of random entries masks a part of every sample, whether ones or zeros mark masked entries.
    """
    if bits.ndim > 1 and bits.shape[-1] > 1:
        bits[..., 0], bits[..., -1] = 1, 0
    return bits
