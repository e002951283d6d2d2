"""Dirichlet partitions: the clients' shares of each class are drawn from Dir(α); the smaller α, the more uneven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.random import Generator, RandomState
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.data.partition import Indices, Labels, Partition
from coterie.data.settings import at_least, between, recorded


@recorded
def dirichlet(
    labels: Labels,
    *,
    num_clients: int = 20,
    alpha: float = 0.1,
    min_size: int = 1,
    train_share: float = 0.75,
    retries: int = 10_000,
    seed: int = 0,
) -> Partition:
    """Pool train and test, assign each class to clients below the average size, then split per client (PFLlib)."""
    return _merged(labels, num_clients, alpha, min_size, train_share, retries, seed, capped=True)


@recorded
def dirichlet_pfllib(
    labels: Labels,
    *,
    num_clients: int = 20,
    alpha: float = 0.1,
    min_size: int = 1,
    train_share: float = 0.75,
    retries: int = 10_000,
    seed: int = 1,
) -> Partition:
    """Like dirichlet, but each client has the very samples that PFLlib's data generator gives it for this seed."""
    _check(num_clients, alpha, seed, min_size=min_size, retries=retries, train_share=train_share)
    between(0, 2**32 - 1, seed=seed)
    draw, y = RandomState(seed), labels.merged
    parts = _retry(
        lambda: draw_parts(draw, y, labels.classes, num_clients, alpha),
        lambda parts: [len(part) for part in parts],
        len(y), num_clients, alpha, min_size, retries,
    )  # fmt: skip
    train, test = [], []
    for part in parts:
        mixed, last = draw.permutation(part), len(part) - max(1, int(train_share * len(part)))
        train.append(mixed[last:])  # as scikit-learn's train_test_split: the test samples come first
        test.append(mixed[:last])
    return Partition("dirichlet-pfllib", tuple(train), tuple(test), merged=True)


@recorded
def dirichlet_crc(
    labels: Labels,
    *,
    num_clients: int = 100,
    alpha: float = 0.5,
    min_size: int = 10,
    train_share: float = 0.8,
    retries: int = 10_000,
    seed: int = 0,
) -> Partition:
    """Like dirichlet, without the limit on a client's size (FedCRC)."""
    return _merged(labels, num_clients, alpha, min_size, train_share, retries, seed, capped=False)


@recorded
def dirichlet_pac(labels: Labels, *, num_clients: int = 100, alpha: float = 1.0, seed: int = 0) -> Partition:
    """The same share of a class in train and test; every sample is used exactly once (FedPAC, Table 8)."""
    _check(num_clients, alpha, seed)
    draw = np.random.default_rng(seed)
    p = draw.dirichlet(np.full(num_clients, alpha), labels.classes)  # (K, m)
    parts = []
    for y in (labels.train, labels.test):
        sizes = np.bincount(y, minlength=labels.classes)
        counts = np.stack([cut(share, size) for share, size in zip(p, sizes, strict=True)])
        parts.append(hand_out(y, counts, draw))
    return Partition("dirichlet-pac", parts[0], parts[1])


def cut(p: NDArray[np.float64], size: int) -> Indices:
    """(m,) integers close to p · size that sum to size."""
    edges = (np.cumsum(p) * size).astype(np.int64)
    edges[-1] = size
    return np.diff(edges, prepend=0)


def draw_counts(draw: Generator, sizes: Sequence[int], clients: int, alpha: float, capped: bool) -> Indices | None:
    """(K, m) number of samples per class and client; None if no client can take a class."""
    full = sum(sizes) / clients if capped else np.inf
    held = np.zeros(clients, np.int64)
    counts = []
    for size in sizes:
        p = draw.dirichlet(np.full(clients, alpha)) * (held < full)
        if not p.sum() > 0:
            return None
        counts.append(cut(p / p.sum(), size))
        held += counts[-1]
    return np.stack(counts)


def draw_parts(draw: RandomState, y: Indices, classes: int, clients: int, alpha: float) -> list[Indices] | None:
    """Samples of each client, class by class: samples are shuffled before shares are drawn. None as in draw_counts."""
    parts = [np.zeros(0, np.int64)] * clients
    for label in range(classes):
        samples = np.flatnonzero(y == label)
        draw.shuffle(samples)
        room = np.array([len(part) < len(y) / clients for part in parts])
        p = draw.dirichlet(np.full(clients, alpha)) * room
        if not p.sum() > 0:
            return None
        edges = (np.cumsum(p / p.sum()) * len(samples)).astype(np.int64)[:-1]
        parts = [np.concatenate(pair) for pair in zip(parts, np.split(samples, edges), strict=True)]
    return parts


def hand_out(y: Indices, counts: Indices, draw: Generator) -> tuple[Indices, ...]:
    """Assign `counts[k, i]` random samples of class k to client i, each sample once."""
    pieces = [
        np.split(draw.permutation(np.flatnonzero(y == label)), np.cumsum(row)[:-1]) for label, row in enumerate(counts)
    ]
    return tuple(np.concatenate(of_client) for of_client in zip(*pieces, strict=True))


def _check(
    num_clients: int, alpha: float, seed: int, min_size: int = 1, retries: int = 1, train_share: float = 0.5
) -> None:
    at_least(1, num_clients=num_clients, min_size=min_size, retries=retries)
    between(1e-3, 1e6, alpha=alpha)
    between(0, 1, train_share=train_share)
    at_least(0, seed=seed)


def _merged(
    labels: Labels,
    num_clients: int,
    alpha: float,
    min_size: int,
    train_share: float,
    retries: int,
    seed: int,
    capped: bool,
) -> Partition:
    _check(num_clients, alpha, seed, min_size=min_size, retries=retries, train_share=train_share)
    draw, y = np.random.default_rng(seed), labels.merged
    sizes = np.bincount(y, minlength=labels.classes).tolist()
    counts = _retry(
        lambda: draw_counts(draw, sizes, num_clients, alpha, capped),
        lambda counts: counts.sum(axis=0).tolist(),
        len(y), num_clients, alpha, min_size, retries,
    )  # fmt: skip
    train, test = [], []
    for part in hand_out(y, counts, draw):
        mixed = draw.permutation(part)
        first = max(1, int(train_share * len(mixed)))
        train.append(mixed[:first])
        test.append(mixed[first:])
    return Partition("dirichlet", tuple(train), tuple(test), merged=True)


T = TypeVar("T")


def _retry(
    attempt: Callable[[], T | None],
    sizes: Callable[[T], Sequence[int]],
    samples: int,
    clients: int,
    alpha: float,
    min_size: int,
    retries: int,
) -> T:
    """The first attempt that leaves no client below `min_size`. sizes: of the clients."""
    best = 0
    for _ in range(retries if clients * min_size <= samples else 0):
        made = attempt()
        smallest = 0 if made is None else min(sizes(made))
        if made is not None and smallest >= min_size:
            return made
        best = max(best, smallest)
    if clients * min_size > samples:
        raise CoterieError(
            f"{samples} samples are too few for {clients} clients with min_size={min_size}, which need "
            f"{clients * min_size}; lower min_size or num_clients"
        )
    raise CoterieError(
        f"none of {retries} draws of {samples} samples at alpha={alpha} gave each of {clients} clients "
        f"min_size={min_size} (the best gave {best}); lower min_size or num_clients, or raise alpha or retries"
    )
