"""The inputs of a personal model: description, check, and random samples to try it with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.data import Transform, is_pixels
from coterie.core.errors import CoterieError


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


def probe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """(3, *shape) random samples; integers that are not pixels are tokens 0 and 1, which every vocabulary has."""
    draw = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(3, *shape, generator=draw).to(dtype)
    return torch.randint(0, 256 if is_pixels(shape, dtype) else 2, (3, *shape), generator=draw).to(dtype)
