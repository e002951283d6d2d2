"""Build the data of a federation from a dataset and a partition."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError, unknown
from coterie.core.task import Task
from coterie.data.dataset import Dataset
from coterie.data.partition import Indices, Partition
from coterie.data.scenarios import PARTITIONS
from coterie.data.settings import at_least
from coterie.data.task_choice import fitted

CLASSLESS = ("natural", "iid")  # rules for tasks without classes


def divide(dataset: Dataset, rule: str, **settings: Any) -> Partition:
    """Partition a dataset by a rule of PARTITIONS."""
    if rule not in PARTITIONS:
        raise unknown("partition", rule, PARTITIONS)
    if not dataset.task.one_class and rule not in CLASSLESS:
        raise CoterieError(
            f"partition '{rule}' divides samples by class, which {dataset.name} ({dataset.task.name}) does not have; "
            f"choose {' or '.join(CLASSLESS)}"
        )
    known = [name for name in inspect.signature(PARTITIONS[rule]).parameters if name != "labels"]
    for name in settings:
        if not known and dataset.owners:
            raise CoterieError(
                f"{dataset.name} is already divided into clients (hospitals, writers, devices), so {name} cannot be "
                "set; --partition RULE divides it again"
            )
        if name not in known:
            raise unknown(f"setting of {rule}", name, known)
    return PARTITIONS[rule](dataset.labels, **settings)


def federate(dataset: Dataset, partition: Partition, validation: float = 0.0, seed: int = 0) -> FederatedData:
    """Gather every client's samples. validation: share of its training samples to set aside, never all of them."""
    if not 0 <= validation < 1:
        raise CoterieError(f"validation must be at least 0 and less than 1, got {validation}")
    at_least(0, partition_seed=seed)
    partition.check(dataset.labels)
    for client, part in enumerate(partition.train):
        if len(part) == 0:
            raise CoterieError(f"client {client} has no training samples; use fewer clients or another seed")
    if partition.angles is not None and dataset.x_train.ndim != 4:
        raise CoterieError(f"{dataset.name} has no images to rotate")
    if partition.merged and dataset.groups is not None:
        raise CoterieError(
            f"partition '{partition.name}' redraws training and test samples, which would divide the groups of "
            f"{dataset.name}; use another partition"
        )
    group, group_test = dataset.groups or (None, None)
    at_train, at_test = (dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)
    if partition.merged:
        at_train = at_test = (torch.cat([at_train[0], at_test[0]]), torch.cat([at_train[1], at_test[1]]))
    if group is None:
        out = _drawn(partition.train, validation, seed)
    else:
        out = _drawn_groups([group.numpy()[part] for part in partition.train], validation, seed)
    train = [part[~mask] for part, mask in zip(partition.train, out, strict=True)]
    held_out = [part[mask] for part, mask in zip(partition.train, out, strict=True)]
    if lone := [client for client, part in enumerate(train) if len(part) == 0]:
        raise CoterieError(
            f"client {lone[0]} has no training samples left: all its groups were drawn for validation on other "
            "clients; use another --partition-seed"
        )
    if dataset.transform.inputs and partition.angles is not None:
        raise CoterieError(f"partition '{partition.name}' rotates images; {dataset.name} has several inputs")
    own = _gather(*at_train, train, partition, group)
    return FederatedData(
        name=dataset.name,
        classes=len(dataset.classes) if dataset.task.one_class else 0,
        train=own,
        task=task_of(dataset, own),
        test=_gather(*at_test, partition.test, partition, group_test),
        validation=_gather(*at_train, held_out, partition, group) if validation else None,
        transform=dataset.transform,
        class_names=dataset.classes,
        client_names=dataset.client_names if partition.name == "natural" else (),
        partition=replace(partition, settings={**partition.settings, **dataset.record}),
    )


def task_of(dataset: Dataset, train: Split) -> Task:
    """The task of a dataset, fitted to training samples."""
    if isinstance(dataset.task, Task):
        return dataset.task
    labels = [dataset.y_train, dataset.y_test]
    most = 1 + max((int(y.max()) for y in labels if y.numel() and not y.is_floating_point()), default=-1)
    classes = len(dataset.classes) if dataset.task.one_class else most
    return fitted(dataset.task, train, dataset.transform, classes, {})


def set_aside(data: FederatedData, share: float, seed: int = 0) -> FederatedData:
    """Move a share of each client's training samples to validation; groups and duplicates stay together."""
    if not 0 < share < 1:
        raise CoterieError(f"validation must be above 0 and less than 1, got {share}")
    group = data.train.group
    if group is None:
        masks = _drawn([_copies(data.train.client(i)[0]) for i in range(data.num_clients)], share, seed)
    else:
        masks = _drawn_groups([group[own].numpy() for own in data.train.ranges()], share, seed)
    out = torch.from_numpy(np.concatenate(masks))
    kept, held_out = (
        Split(
            data.train.x[chosen],
            data.train.y[chosen],
            tuple(int(mask.sum()) for mask in of),
            None if group is None else group[chosen],
        )
        for chosen, of in ((~out, [~mask for mask in masks]), (out, masks))
    )
    return replace(data, train=kept, validation=held_out)


def folded(data: FederatedData) -> FederatedData:
    """Move the validation samples back to each client's training samples."""
    if data.validation is None:
        return data
    splits = (data.train, data.validation)

    def joined(values: Sequence[Tensor]) -> Tensor:
        ranges = [split.ranges() for split in splits]
        return torch.cat([v[own[i]] for i in range(data.num_clients) for v, own in zip(values, ranges, strict=True)])

    groups = [split.group for split in splits if split.group is not None]
    x, y = joined([split.x for split in splits]), joined([split.y for split in splits])
    sizes = tuple(map(sum, zip(*(split.sizes for split in splits), strict=True)))
    return replace(data, train=Split(x, y, sizes, joined(groups) if groups else None), validation=None)


def _copies(x: Tensor) -> Indices:
    """(n,) an id for each sample, the same for bitwise equal samples."""
    rows = x.reshape(len(x), -1).contiguous().numpy()
    return np.unique(rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))), return_inverse=True)[
        1
    ].ravel()


def _drawn(parts: Sequence[Indices], share: float, seed: int) -> list[npt.NDArray[np.bool_]]:
    """For each part, a mask of a random `share`, never all of it; duplicates of a sample stay together."""
    draw = np.random.default_rng(seed)
    masks = []
    for part in parts:
        distinct = draw.permutation(np.unique(part))
        size = min(max(1, round(share * len(distinct))), len(distinct) - 1) if share else 0
        masks.append(np.isin(part, distinct[:size]))
    return masks


def _drawn_groups(parts: Sequence[Indices], share: float, seed: int) -> list[npt.NDArray[np.bool_]]:
    """The same for parts of group ids; a group of several clients is on the same side on all of them."""
    draw = np.random.default_rng(seed)
    side: dict[int, bool] = {}
    masks = []
    for part in parts:
        own = draw.permutation(np.unique(part)).tolist()
        size = min(max(1, round(share * len(own))), len(own) - 1) if share else 0
        for at, name in enumerate(own):
            side.setdefault(name, at < size)
        masks.append(np.array([side[name] for name in part.tolist()], bool))
    return masks


def _gather(x: Tensor, y: Tensor, parts: Sequence[Indices], partition: Partition, group: Tensor | None = None) -> Split:
    sizes = tuple(len(part) for part in parts)
    samples = torch.from_numpy(np.concatenate(parts))
    split = Split(x[samples], y[samples], sizes, None if group is None else group[samples])
    owners = split.owners()
    if partition.label_maps is not None:
        split = replace(split, y=torch.from_numpy(partition.label_maps)[owners, split.y])
    if partition.angles is not None:
        for angle in sorted(set(partition.angles) - {0.0}):
            turned = torch.tensor([own == angle for own in partition.angles])[owners]
            split.x[turned] = rotate(split.x[turned], angle)
    return split


def rotate(x: Tensor, angle: float) -> Tensor:
    """Images (N, C, H, W) rotated counterclockwise by `angle` degrees: bilinear, black corners, same size."""
    height, width = x.shape[-2:]
    turn = torch.deg2rad(torch.tensor(angle, dtype=torch.float64))
    cos, sin = float(turn.cos()), float(turn.sin())
    theta = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])
    grid = affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    turned = grid_sample(x.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned.round().clamp(0, 255).to(x.dtype) if x.dtype == torch.uint8 else turned
