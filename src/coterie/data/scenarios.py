"""All partition rules by name, and the short ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import Generator

from coterie.core.errors import CoterieError
from coterie.data.dirichlet import dirichlet, dirichlet_crc, dirichlet_pac, dirichlet_pfllib
from coterie.data.dominant import Pool, concept_shift, dominant, imbalanced, rotation, scarce, shares
from coterie.data.partition import Indices, Labels, Partition
from coterie.data.settings import at_least, between, recorded


@recorded
def iid(
    labels: Labels,
    *,
    num_clients: int = 20,
    local_size: int | None = None,
    test_size: int | None = None,
    seed: int = 0,
) -> Partition:
    """Random samples without replacement, the same number for each client; default: as many as possible."""
    between(1, min(len(labels.train), len(labels.test)), num_clients=num_clients)
    at_least(0, seed=seed)
    draw = np.random.default_rng(seed)
    parts = []
    for name, y, size in (("local_size", labels.train, local_size), ("test_size", labels.test, test_size)):
        most = len(y) // num_clients
        each = most if size is None else size
        between(1, most, **{name: each})
        parts.append(tuple(np.split(draw.permutation(len(y))[: each * num_clients], num_clients)))
    return Partition("iid", parts[0], parts[1])


@recorded
def pathological(
    labels: Labels,
    *,
    num_clients: int = 20,
    classes_per_client: tuple[int, ...] = (3, 3, 5, 5, 8),
    clustered: bool = False,
    local_size: int = 600,
    test_size: int = 300,
    seed: int = 0,
) -> Partition:
    """A few classes per client, in equal parts; its group sets how many, and they are drawn per client or per group."""
    at_least(1, num_clients=num_clients, local_size=local_size, test_size=test_size)
    at_least(0, seed=seed)
    for number in classes_per_client or (0,):
        between(1, labels.classes, classes_per_client=number)
    groups = [client % len(classes_per_client) for client in range(num_clients)]
    numbers = classes_per_client if clustered else [classes_per_client[group] for group in groups]
    drawn = draw_classes(np.random.default_rng(seed), numbers, labels.classes, different=clustered)
    sets = [drawn[group] for group in groups] if clustered else drawn
    parts = [_balanced(y, labels.classes, sets, n) for y, n in ((labels.train, local_size), (labels.test, test_size))]
    return Partition("pathological", parts[0], parts[1], groups=tuple(groups))


def draw_classes(draw: Generator, numbers: Sequence[int], classes: int, different: bool) -> list[tuple[int, ...]]:
    """Draw `numbers[i]` classes for each i, covering all classes if the numbers allow it."""
    for _ in range(10_000):
        sets = [tuple(sorted(draw.choice(classes, number, replace=False).tolist())) for number in numbers]
        complete = len(set().union(*sets)) == classes or sum(numbers) < classes
        if complete and (len(set(sets)) == len(sets) or not different):
            return sets
    raise CoterieError(f"found no distinct sets of {tuple(numbers)} classes that cover all {classes} classes")


def _balanced(y: Indices, classes: int, sets: Sequence[tuple[int, ...]], size: int) -> tuple[Indices, ...]:
    pool = Pool(y, classes)
    return tuple(
        np.concatenate([pool.take(label, n) for label, n in zip(own, shares(size, len(own)), strict=True)])
        for own in sets
    )


@recorded
def natural(labels: Labels) -> Partition:
    """Clients as given by the data: hospitals, writers, devices."""
    if labels.owners is None:
        raise CoterieError(f"{labels.name} does not say which client a sample comes from; choose another partition")
    clients = 1 + max(int(owners.max(initial=0)) for owners in labels.owners)
    train, test = (_by_owner(owners, clients) for owners in labels.owners)
    return Partition("natural", train, test, groups=tuple(range(clients)))


def _by_owner(owners: Indices, clients: int) -> tuple[Indices, ...]:
    counts = np.bincount(owners, minlength=clients)
    return tuple(np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1]))


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "dominant": dominant,
    "dirichlet": dirichlet,
    "dirichlet-pac": dirichlet_pac,
    "dirichlet-crc": dirichlet_crc,
    "dirichlet-pfllib": dirichlet_pfllib,
    "iid": iid,
    "pathological": pathological,
    "imbalanced": imbalanced,
    "scarce": scarce,
    "concept-shift": concept_shift,
    "rotation": rotation,
    "natural": natural,
}
