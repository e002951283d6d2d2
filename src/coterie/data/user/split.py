"""Split samples into training and test, if the data have no split."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from coterie.core.data import Column
from coterie.data.user.frames import is_free_text
from coterie.data.user.reading import Array, Notes, Part, Reading

Mask = NDArray[np.bool_]


def digests(x: Array) -> Array:
    """(n,) a 16-byte hash of each sample (n, ...)."""
    made = (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in x)
    return np.array(list(made), dtype="V16") if len(x) else np.empty(0, "V16")


def split_parts(parts: list[Part], y: Array, group: Array | None, reading: Reading) -> tuple[Mask, bool]:
    """(N,) a mask of the test samples, and whether any part was split here."""
    ends = np.cumsum([len(part.x) for part in parts])[:-1]
    groups = [None] * len(parts) if group is None else np.split(group, ends)
    tests, decided = [], dict[int, bool]()
    for part, own, together in zip(parts, np.split(y, ends), groups, strict=True):
        if part.split is not None:
            tests.append(np.full(len(own), part.split == "test"))
            continue
        copies = digests(part.x) if together is None else together
        classes = own if together is None else most_common(own, together)
        chosen = choose_test(classes, copies, reading.test_share, reading.split_seed, part.client)
        if together is not None:  # a group of several clients is on the same side on all of them
            for name, side in zip(together.tolist(), chosen.tolist(), strict=True):
                decided.setdefault(name, side)
            chosen = np.array([decided[name] for name in together.tolist()], bool)
        tests.append(chosen)
    return np.concatenate(tests), any(part.split is None for part in parts)


def divided_groups(group: Array, test: Mask, place: Callable[[int], str], notes: Notes) -> None:
    """Report groups with training and test samples, which only a split in the data can have."""
    both = np.intersect1d(group[test], group[~test])
    rows = np.array([np.flatnonzero(test & (group == name))[0] for name in both[:100]], np.int64)

    def describe(i: int) -> str:
        return f"{place(i)} and {place(int(np.flatnonzero(~test & (group == group[i]))[0]))}"

    notes.wrong_at("group in training and in test", rows, describe)


def keep_categories(
    x: Array,
    columns: tuple[Column, ...],
    group: Array | None,
    test: Mask,
    given: Mask,
    place: Callable[[int], str],
    notes: Notes,
) -> Mask:
    """(N,) the mask of test samples, after moving those with a category that no training sample has to training.

    given (N,): whether the data define the split; then such categories are reported instead.
    """
    test = test.copy()
    for at, column in enumerate(columns):
        if not column.categories or is_free_text(column.categories, len(x)):  # reported as an error
            continue
        codes = x[:, at]
        unseen = test & ~np.isnan(codes) & ~np.isin(codes, np.unique(codes[~test]))
        moved = unseen & ~given
        if group is not None:
            moved = np.isin(group, group[moved]) & ~given
        test &= ~moved

        def describe(i: int, codes: Array = codes, column: Column = column) -> str:
            return f"{place(i)}, column '{column.name}': {column.categories[int(codes[i])]!r}"

        notes.wrong_at("category that no training sample has", np.flatnonzero(unseen & given), describe)
    return test


def choose_test(y: Array, copies: Array, share: float, seed: int, client: str) -> Mask:
    """(n,) a mask of a client's test samples: a random `share` of each class, never all samples.

    copies (n,): samples with the same value stay together. The draw depends on the seed and the client's name.
    """
    _, first, same = np.unique(copies, return_index=True, return_inverse=True)
    draw = np.random.default_rng([seed, zlib.crc32(client.encode("utf-8", "replace"))])
    mixed = draw.permutation(len(first))
    order = mixed[np.argsort(y[first][mixed], kind="stable")]  # by class, shuffled within each class
    steps = np.floor(np.arange(len(order) + 1) * share + 0.5)
    chosen = np.zeros(len(order), bool)
    chosen[order] = np.diff(steps) > 0  # evenly along the order: each class within 1 of its share
    if chosen.all():
        chosen[:1] = False
    return chosen[same.reshape(-1)]


def most_common(y: Array, group: Array) -> Array:
    """(n,) for each sample the most frequent class of its group; the smallest if tied."""
    number = np.unique(group, return_inverse=True)[1].reshape(-1)
    pairs, counts = np.unique(np.stack([number, y]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    _, first = np.unique(pairs[0][order], return_index=True)
    made: Array = pairs[1][order][first][number]
    return made
