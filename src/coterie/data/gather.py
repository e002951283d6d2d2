"""A dataset and a partition become the data of a federation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from coterie.core.errors import CoterieError, unknown
from coterie.core.samples import FederatedData, Split
from coterie.data.datasets import Dataset
from coterie.data.partition import Indices, Partition
from coterie.data.scenarios import PARTITIONS


def divide(dataset: Dataset, rule: str, **settings: Any) -> Partition:
    """The partition of a dataset by a rule of PARTITIONS."""
    if rule not in PARTITIONS:
        raise unknown("partition", rule, PARTITIONS)
    known = [name for name in inspect.signature(PARTITIONS[rule]).parameters if name != "labels"]
    for name in settings:
        if name not in known:
            raise unknown(f"setting of {rule}", name, known)
    return PARTITIONS[rule](dataset.labels, **settings)


def federate(dataset: Dataset, partition: Partition, validation: float = 0.0, seed: int = 0) -> FederatedData:
    """Every client's samples; `validation` is the share of its training samples to set aside, never all of them."""
    if not 0 <= validation < 1:
        raise CoterieError(f"validation is {validation}: it must be at least 0 and less than 1")
    partition.check(dataset.labels)
    for client, part in enumerate(partition.train):
        if len(part) == 0:
            raise CoterieError(f"client {client} has no training samples; use fewer clients or another seed")
    if partition.angles is not None and dataset.x_train.ndim != 4:
        raise CoterieError(f"{dataset.name} has no images to rotate")
    at_train, at_test = (dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)
    if partition.merged:
        at_train = at_test = (torch.cat([at_train[0], at_test[0]]), torch.cat([at_train[1], at_test[1]]))
    train, held_out = _set_aside(partition.train, validation, seed)
    return FederatedData(
        name=dataset.name,
        classes=len(dataset.classes),
        train=_gather(*at_train, train, partition),
        test=_gather(*at_test, partition.test, partition),
        validation=_gather(*at_train, held_out, partition) if validation else None,
        transform=dataset.transform,
        class_names=dataset.classes,
        partition=replace(partition, settings={**partition.settings, **dataset.record}),
    )


def _set_aside(parts: Sequence[Indices], share: float, seed: int) -> tuple[list[Indices], list[Indices]]:
    """Each part without a random `share` of it, and these shares; the order stays, copies of a sample stay together."""
    draw = np.random.default_rng(seed)
    kept, held_out = [], []
    for part in parts:
        distinct = draw.permutation(np.unique(part))
        size = min(max(1, round(share * len(distinct))), len(distinct) - 1) if share else 0
        out = np.isin(part, distinct[:size])
        kept.append(part[~out])
        held_out.append(part[out])
    return kept, held_out


def _gather(x: Tensor, y: Tensor, parts: Sequence[Indices], partition: Partition) -> Split:
    sizes = tuple(len(part) for part in parts)
    samples = torch.from_numpy(np.concatenate(parts))
    split = Split(x[samples], y[samples], sizes)
    owners = split.owners()
    if partition.label_maps is not None:
        split = Split(split.x, torch.from_numpy(partition.label_maps)[owners, split.y], sizes)
    if partition.angles is not None:
        for angle in sorted(set(partition.angles) - {0.0}):
            turned = torch.tensor([own == angle for own in partition.angles])[owners]
            split.x[turned] = rotate(split.x[turned], angle)
    return split


def rotate(x: Tensor, angle: float) -> Tensor:
    """Images (N, C, H, W) turned counter-clockwise by `angle` degrees: bilinear, black corners, same size."""
    height, width = x.shape[-2:]
    turn = torch.deg2rad(torch.tensor(angle, dtype=torch.float64))
    cos, sin = float(turn.cos()), float(turn.sin())
    theta = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])
    grid = affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    turned = grid_sample(x.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned.round().clamp(0, 255).to(x.dtype) if x.dtype == torch.uint8 else turned
