"""Mean and deviation of the training samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.errors import unknown
from coterie.core.samples import FederatedData, Split, Transform

NORMALISE = ("auto", "none")
BLOCK = 4096  # samples at a time, in float64


def normalised(data: FederatedData, transform: Transform, how: str | None) -> FederatedData:
    """With this transform; auto: with the statistics of all clients' training samples together; none: without any."""
    if how is None:
        return replace(data, transform=transform)
    if how not in NORMALISE:
        raise unknown("way to normalise", how, NORMALISE)
    mean, std = moments(data.train) if how == "auto" else ((), ())
    return replace(data, transform=replace(transform, mean=mean, std=std))


def moments(split: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel or column, of pixels scaled to 0..1; the deviation of a constant is 1."""
    unit = 255.0 if split.x.dtype == torch.uint8 else 1.0

    def mean_of(f: Callable[[Tensor], Tensor]) -> Tensor:
        sums = [f(x.double().movedim(1, -1).flatten(0, -2) / unit).sum(0) for x in torch.split(split.x, BLOCK)]
        return torch.stack(sums).sum(0) / (split.x.numel() / len(sums[0]))

    mean = mean_of(lambda values: values)
    std = mean_of(lambda values: (values - mean).square()).sqrt()
    std = torch.where(std > 1e-8 * mean.abs().clamp_min(1e-8), std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())
