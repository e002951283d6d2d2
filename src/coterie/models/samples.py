"""The inputs of a personal model: description, check, and random samples to try it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.data import Transform, is_pixels
from coterie.core.errors import CoterieError
from coterie.core.packing import Input, Inputs, mixed, pack


@dataclass(frozen=True)
class ModelInfo:
    """The client, inputs and outputs of a personal model."""

    client: int
    client_name: str  # the number, if clients have no names
    class_names: tuple[str, ...]
    shape: tuple[int, ...]  # of one raw sample
    dtype: torch.dtype  # of raw samples
    transform: Transform
    data: str  # name of the dataset


def accepted(info: ModelInfo, x: Any) -> Inputs:
    """Samples as the model takes them: (B, ...), or several inputs by name. Others are refused."""
    inputs, padding = info.transform.inputs, info.transform.padding
    if not inputs and padding is not None and isinstance(x, list | tuple):
        rows = [torch.as_tensor(one)[None] for one in x]
        longest = max((row.shape[1] for row in rows if row.ndim > 1), default=0)
        x = torch.cat([filled_up(row, (max(longest, info.shape[0]), *info.shape[1:]), padding) for row in rows])
    if not inputs and isinstance(x, Tensor):
        check_samples(info, x)
        return x if padding is None else filled_up(x, info.shape, padding)
    if inputs and isinstance(x, Tensor) and (x.dtype, tuple(x.shape[1:])) == (info.dtype, info.shape):
        return x  # packed, as the federation's data are
    if not inputs or not isinstance(x, Mapping):
        takes = f"a dictionary of {', '.join(map(str, inputs))}" if inputs else "a tensor"
        raise CoterieError(f"this model takes {takes}; got {type(x).__name__}")
    for name in (*(one.name for one in inputs), *x):
        if (name in x) != any(name == one.name for one in inputs):
            word = "missing" if name not in x else "unknown"
            raise CoterieError(f"input '{name}' is {word}; this model takes {', '.join(map(str, inputs))}")
    try:
        given = {one.name: torch.as_tensor(x[one.name]) for one in inputs}
    except (TypeError, ValueError, RuntimeError) as error:  # text, or lists of different lengths
        raise CoterieError(f"inputs must be tensors or arrays of numbers: {error}") from None
    made = {one.name: accepted_input(info, one, given[one.name]) for one in inputs}
    count = made[inputs[0].name].shape[0]  # len() would fix it in an exported program
    if any(values.shape[0] != count for values in made.values()):
        found = ", ".join(f"{name} {len(values)}" for name, values in made.items())
        raise CoterieError(f"inputs of different lengths: {found}")
    return made


def filled_up(x: Tensor, shape: tuple[int, ...], padding: float) -> Tensor:
    """Sequences (B, t, ...) -> (B, T, ...), padded at the end as in training. shape: (T, ...) of one sample."""
    if x.ndim != 1 + len(shape) or x.shape[2:] != shape[1:] or x.shape[1] >= shape[0]:
        return x
    return F.pad(x, (0, 0) * (len(shape) - 1) + (0, shape[0] - x.shape[1]), value=padding)


def accepted_input(info: ModelInfo, one: Input, x: Tensor) -> Tensor:
    """One of several inputs, in its type; pixels may also be fractions from 0 to 1."""
    x = x if one.padding is None else filled_up(x, one.shape, one.padding)
    if x.ndim != 1 + len(one.shape) or tuple(x.shape[1:]) != one.shape:
        raise CoterieError(f"input '{one.name}' must have the shape {('batch', *one.shape)}, got {tuple(x.shape)}")
    try:
        check_samples(replace(info, shape=one.shape, dtype=one.type, transform=Transform()), x)
    except CoterieError as error:
        raise CoterieError(f"input '{one.name}': {error}") from None
    if x.is_floating_point() and (one.type.is_floating_point or is_pixels(one.shape, one.type)):
        return x
    if x.is_floating_point() or (one.type == torch.bool) != (x.dtype == torch.bool):
        raise CoterieError(f"input '{one.name}' must be of type {one.dtype}, got {str(x.dtype).removeprefix('torch.')}")
    return x.to(one.type)


def check_samples(info: ModelInfo, x: Tensor) -> None:
    """Refuse samples that would be scaled differently than in training, and rows of a different width."""
    shape, pixels = tuple(x.shape[1:]), is_pixels(info.shape, info.dtype)
    if info.transform.columns and shape != info.shape:
        known = False
    elif pixels and x.is_floating_point():
        known = len(shape) == len(info.shape) and not bool(((x < 0) | (x > 1)).any())
    else:
        known = is_pixels(shape, x.dtype) == pixels
    if known:
        return
    expected, got = (str(kind).removeprefix("torch.") for kind in (info.dtype, x.dtype))
    unscaled = ", from 0 to 255, or fractions from 0 to 1" if pixels else ""
    raise CoterieError(
        f"this model takes {expected} samples of shape (batch, {', '.join(map(str, info.shape))}){unscaled}; "
        f"got {got} of shape {tuple(x.shape)}"
    )


def probe(info: ModelInfo) -> Inputs:
    """(3, ...) random samples; integers that are not pixels are tokens 0 and 1, which every vocabulary has."""
    draw = torch.Generator().manual_seed(0)
    if not info.transform.inputs:
        return _probe(info.shape, info.dtype, draw)
    return {one.name: _probe(one.shape, one.type, draw, several=True) for one in info.transform.inputs}


def probe_rows(info: ModelInfo) -> Tensor:
    """The same as a run holds them: several inputs are packed."""
    x = probe(info)
    return x if isinstance(x, Tensor) else pack(info.transform.inputs, x)


def _probe(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator, several: bool = False) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(3, *shape, generator=draw).to(dtype)
    if is_pixels(shape, dtype):
        return torch.randint(0, 256, (3, *shape), generator=draw).to(dtype)
    bits = torch.randint(0, 2, (3, *shape), generator=draw)
    return (mixed(bits) if several else bits).to(dtype)
