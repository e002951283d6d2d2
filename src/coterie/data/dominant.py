"""Clients in groups, each with a few dominant classes (FedPAC, 2023), and the variants of that paper's appendix.

A client with n samples has n·s% spread evenly over all classes; the rest comes from its group's dominant classes.
Without a seed the partition is deterministic: the samples of each class are dealt in dataset order, starting over when
too few are left; with a seed they are shuffled first. Large federations therefore share samples, and a client that
needs nearly all samples of a class can get one twice. As in the authors' code, remainders go to the last class
(remainder 'last'; 'spread' is fairer), and CIFAR and CINIC start at an offset. One difference: sorting is stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coterie.core.errors import CoterieError, unknown
from coterie.data.partition import Indices, Labels, Partition
from coterie.data.settings import at_least, between, recorded

Groups = Sequence[Sequence[int]]  # the dominant classes of each group; client i is in group i % len(groups)


class Layout(NamedTuple):
    """Sizes and offsets of the authors' code for a dataset."""

    local_size: int = 600
    test_size: int = 0  # 0: same as local_size
    train_offset: int = 0
    test_offset: int = 0


LAYOUTS = {
    "cifar10": Layout(600, 300, 2000, 500),
    "cinic10": Layout(600, 300, 2000, 500),
    "emnist": Layout(1000, 600),
    "cifar100": Layout(600, 300),  # not from the paper: fits 100 test images per class
    "fashion-mnist-small": Layout(300, 150),  # not from the paper: 20 clients share no training image
}


class Pool:
    """Deals the samples of each class in order. key: seed that shuffles each class; None: dataset order."""

    def __init__(self, y: Indices, classes: int, offset: int = 0, key: Sequence[int] | None = None) -> None:
        ends = np.cumsum(np.bincount(y, minlength=classes))
        self.rows = np.split(np.argsort(y, kind="stable"), ends[:-1])
        if key is not None:
            draw = np.random.default_rng(key)
            self.rows = [draw.permutation(row) for row in self.rows]
        self.next = [offset] * classes

    def take(self, label: int, size: int, advance: int | None = None) -> Indices:
        row = self.rows[label]
        if size > len(row):
            raise CoterieError(
                f"class {label} has {len(row)} samples, but one client needs {size}; lower local_size or test_size"
            )
        if size == 0:
            return row[:0]
        start = self.next[label] if self.next[label] + size <= len(row) else 0
        self.next[label] = start + (size if advance is None else advance)
        return row[start : start + size]


def shares(size: int, parts: int, remainder: str = "spread") -> list[int]:
    """Split `size` into `parts` integers."""
    if remainder == "spread":
        return [(part + 1) * size // parts - part * size // parts for part in range(parts)]
    return [size // parts] * (parts - 1) + [size // parts + size % parts]


def deal(
    pool: Pool, sizes: Sequence[int], groups: Groups, noniid_s: float, remainder: str = "last", slow: bool = False
) -> tuple[Indices, ...]:
    """Deal every client its samples. `slow`: advance by the even share of a dominant class only, as the authors' code
    does, so the remainder of the last class is dealt again."""
    clients = []
    for client, size in enumerate(sizes):
        common = int(size * noniid_s / 100)
        parts = [pool.take(label, n) for label, n in enumerate(shares(common, len(pool.rows), remainder))]
        group = groups[client % len(groups)]
        own = shares(size - common, len(group), remainder)
        parts += [pool.take(label, n, own[0] if slow else n) for label, n in zip(group, own, strict=True)]
        clients.append(np.concatenate(parts))
    return tuple(clients)


def dominant_classes(labels: Labels) -> Groups:
    """EMNIST: digits, uppercase and lowercase letters. Others: three neighboring classes; adjacent groups share one."""
    if labels.name == "emnist":
        return range(10), range(10, 36), range(36, 62)
    if labels.classes < 4:
        raise CoterieError(f"dominant classes need a dataset of at least 4 classes; {labels.name} has {labels.classes}")
    return [[label % labels.classes for label in (g, g + 1, g + 2)] for g in range(0, labels.classes, 2)]


@recorded
def dominant(
    labels: Labels,
    *,
    num_clients: int = 20,
    noniid_s: float = 20,
    local_size: int | None = None,
    test_size: int | None = None,
    train_offset: int | None = None,
    test_offset: int | None = None,
    remainder: str = "last",
    seed: int | None = None,
) -> Partition:
    """Groups of clients with dominant classes; `noniid_s` % of a client's samples are spread over all classes."""
    at_least(1, num_clients=num_clients)
    layout = _layout(labels, local_size, test_size, train_offset, test_offset)
    return _dominant(labels, [layout.local_size] * num_clients, layout, noniid_s, remainder, seed=seed)


@recorded
def scarce(
    labels: Labels,
    *,
    num_clients: int = 1000,
    noniid_s: float = 20,
    local_size: int = 50,
    test_size: int = 300,
    seed: int | None = None,
) -> Partition:
    """Dominant classes, with many clients of few samples each."""
    return dominant(
        labels, num_clients=num_clients, noniid_s=noniid_s, local_size=local_size, test_size=test_size, seed=seed
    )


@recorded
def imbalanced(
    labels: Labels,
    *,
    num_clients: int = 20,
    noniid_s: float = 20,
    sizes: tuple[int, ...] = (300, 600, 1200),
    test_size: int | None = None,
    seed: int = 0,
) -> Partition:
    """Dominant classes, with a client's number of training samples drawn from `sizes`."""
    at_least(1, num_clients=num_clients, sizes=min(sizes, default=0))
    at_least(0, seed=seed)
    drawn = np.random.default_rng(seed).choice(sizes, num_clients).tolist()
    layout = _layout(labels, None, test_size)
    return replace(_dominant(labels, drawn, layout, noniid_s), settings={"test_size": layout.test_size})


@recorded
def concept_shift(
    labels: Labels,
    *,
    num_clients: int = 20,
    noniid_s: float = 20,
    local_size: int | None = None,
    test_size: int | None = None,
    seed: int = 0,
) -> Partition:
    """Dominant classes, with permuted labels in every group but the first."""
    at_least(0, seed=seed)
    made = dominant(labels, num_clients=num_clients, noniid_s=noniid_s, local_size=local_size, test_size=test_size)
    draw = np.random.default_rng(seed)
    known = np.arange(labels.classes)
    maps = np.stack([known, *(draw.permutation(labels.classes) for _ in range(max(made.groups)))])
    settings = {name: value for name, value in made.settings.items() if name != "seed"}  # not this rule's seed
    return replace(made, label_maps=maps[list(made.groups)], settings=settings)


@recorded
def rotation(
    labels: Labels,
    *,
    num_clients: int = 20,
    local_size: int | None = None,
    test_size: int | None = None,
    angles: tuple[float, ...] = (0, 72, 144, 216, 288),
    seed: int | None = None,
) -> Partition:
    """All classes evenly on every client; the images of each group are rotated by its angle in degrees."""
    at_least(1, num_clients=num_clients, angles=len(angles))
    layout = _layout(labels, local_size, test_size)
    made = _dominant(labels, [layout.local_size] * num_clients, layout, 100, groups=[[0]] * len(angles), seed=seed)
    return replace(made, angles=tuple(float(angles[group]) for group in made.groups))


def _layout(
    labels: Labels,
    local_size: int | None,
    test_size: int | None,
    train_offset: int | None = None,
    test_offset: int | None = None,
) -> Layout:
    """The given values, else those of the authors."""
    sizes = {"local_size": local_size, "test_size": test_size}
    offsets = {"train_offset": train_offset, "test_offset": test_offset}
    at_least(1, **given(sizes))
    at_least(0, **given(offsets))
    layout = LAYOUTS.get(labels.name, Layout())._replace(**given(sizes), **given(offsets))
    return layout if layout.test_size else layout._replace(test_size=layout.local_size)


def given(settings: dict[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in settings.items() if value is not None}


def _dominant(
    labels: Labels,
    sizes: Sequence[int],
    layout: Layout,
    noniid_s: float,
    remainder: str = "last",
    groups: Groups | None = None,
    seed: int | None = None,
) -> Partition:
    at_least(0, **given({"seed": seed}))
    between(0, 100, noniid_s=noniid_s)
    if remainder not in ("last", "spread"):
        raise unknown("remainder", remainder, ("last", "spread"))
    groups = groups or dominant_classes(labels)
    slow = labels.name == "emnist" and remainder == "last"
    tests = [layout.test_size] * len(sizes)
    keys = [None if seed is None else (seed, split) for split in (0, 1)]
    return Partition(
        "dominant",
        deal(
            Pool(labels.train, labels.classes, layout.train_offset, keys[0]), sizes, groups, noniid_s, remainder, slow
        ),
        deal(Pool(labels.test, labels.classes, layout.test_offset, keys[1]), tests, groups, noniid_s, remainder, slow),
        groups=tuple(client % len(groups) for client in range(len(sizes))),
        settings=layout._asdict(),
    )
