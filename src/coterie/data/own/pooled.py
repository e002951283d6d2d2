"""The parts of all clients pooled: one shape, one type, classes as numbers, every sample train or test."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.data.datasets import Dataset
from coterie.data.own.reading import (
    MISSING,
    NO_LABEL,
    OTHER_SHAPE,
    OUT_OF_RANGE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    in_order,
)
from coterie.data.own.split import choose_test, digests

MOST_CLASSES = 10_000
Whole = NDArray[np.int64]


class Places:
    """Tells file and row of every sample."""

    def __init__(self, parts: list[Part]) -> None:
        self.places = [part.place for part in parts]
        self.starts = np.cumsum([0, *(len(part.x) for part in parts[:-1])])

    def __call__(self, i: int) -> str:
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.places[part](i - int(self.starts[part]))


@dataclass(frozen=True)
class Pooled:
    form: str  # what kind of data it is, in words
    clients: tuple[str, ...]  # their names
    classes: tuple[str, ...]
    x: Array  # (N, ...) uint8, float16 or float32
    y: Whole  # (N,) -1: no class
    owner: Whole  # (N,)
    test: NDArray[np.bool_]  # (N,)
    divided: bool  # whether a split was made here
    place: Places

    def sizes(self, chosen: NDArray[np.bool_]) -> Whole:
        """(m,) how many of the chosen samples each client has."""
        return np.bincount(self.owner[chosen], minlength=len(self.clients))

    def dataset(self, name: str, reading: Reading) -> Dataset:
        x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        owner, test = torch.from_numpy(self.owner), torch.from_numpy(self.test)
        record: dict[str, Any] = {"client_names": list(self.clients)}
        if self.divided:
            record["split"] = {"made": "per client and class", "share": reading.test_share, "seed": reading.split_seed}
        owners = (owner[~test], owner[test])
        return Dataset(name, x[~test], y[~test], x[test], y[test], self.classes, owners=owners, record=record)


def pool(found: Found, reading: Reading, notes: Notes, where: str) -> Pooled:
    """All samples that can be used; whatever cannot be is noted. where: what it all is in, for errors."""
    names = tuple(dict.fromkeys(part.client for part in found.parts))
    parts = alike([part for part in found.parts if len(part.x)], notes)
    if not parts:
        raise CoterieError(f"{where}: there are no samples" + "".join(f"; {problem}" for problem in notes.errors))
    x = np.concatenate([part.x for part in parts])
    index = {name: i for i, name in enumerate(names)}
    owner = np.repeat([index[part.client] for part in parts], [len(part.x) for part in parts])
    place = Places(parts)
    y, classes = numbered(joined_labels(parts), found.classes, place, notes)
    if len(classes) > MOST_CLASSES:
        raise CoterieError(f"{where}: {len(classes):,} classes are too many; is the label the right one?")
    finite(x, found.columns, place, notes)
    test, divided = split_parts(parts, y, reading)
    pooled = Pooled(found.form, names, classes, x, y, owner, test, divided, place)
    count_clients(pooled, notes)
    return pooled


def alike(parts: list[Part], notes: Notes) -> list[Part]:
    """The parts with samples of the most frequent shape and type; the others are noted."""
    parts = [part._replace(x=samples(part)) for part in parts]
    kinds = Counter[tuple[Any, ...]]()
    for part in parts:
        kinds[part.x.shape[1:], part.x.dtype] += len(part.x)
    if not kinds:
        return []
    usual = kinds.most_common(1)[0][0]
    for part in parts:
        if (own := (part.x.shape[1:], part.x.dtype)) != usual:
            what = OTHER_SHAPE if own[0] != usual[0] else "another type of numbers than the rest"
            notes.wrong(what, f"{part.place(0)}, {len(part.x)} samples: {told(*own)}, most have {told(*usual)}")
    return [part for part in parts if (part.x.shape[1:], part.x.dtype) == usual]


def told(shape: tuple[int, ...], kind: Any) -> str:
    return f"{' x '.join(map(str, shape))} {kind}"


def samples(part: Part) -> Array:
    """uint8 and float16 as they are, other numbers as float32."""
    x = part.x
    if x.dtype.kind not in "buif":
        raise CoterieError(f"{part.place(0)}: samples of type {x.dtype}; they must be numbers")
    if x.dtype in (np.uint8, np.float16):
        return x
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is told as such
        return x.astype(np.float32)


def joined_labels(parts: list[Part]) -> Array:
    """(N,) numbers where all clients have numbers; names where one has names."""
    labels = [part.y for part in parts]
    if any(y.dtype.kind == "U" for y in labels):
        labels = [y if y.dtype.kind == "U" else np.where(y == MISSING, "", y.astype(str)) for y in labels]
    return np.concatenate(labels)


def numbered(y: Array, known: tuple[str, ...] | None, place: Places, notes: Notes) -> tuple[Whole, tuple[str, ...]]:
    """(N,) the number of each label's class, -1 where it has none; and the names of the classes."""
    if y.dtype.kind == "U":
        values, at = np.unique(y, return_inverse=True)
        names = known or tuple(sorted((str(v) for v in values if v), key=in_order))
        number = {name: i for i, name in enumerate(names)}
        labels = np.array([number.get(str(v), -1) for v in values], np.int64)[at.reshape(-1)]
        gone = y == ""
    else:
        gone = y == MISSING
        fine = (y >= 0) & (y < (len(known) if known else MOST_CLASSES))
        labels = np.where(fine, y, -1)
        names = known or tuple(map(str, range(int(labels.max()) + 1)))
    most = len(known) if known else MOST_CLASSES
    notes.wrong_at(NO_LABEL, np.flatnonzero(gone), place)
    wrong = np.flatnonzero((labels < 0) & ~gone)
    notes.wrong_at(OUT_OF_RANGE, wrong, lambda i: f"{place(i)}: {y[i]} is not one of the classes 0 to {most - 1}")
    return labels, names


def finite(x: Array, columns: tuple[str, ...], place: Places, notes: Notes) -> None:
    if x.dtype == np.uint8:
        return
    flat = x.reshape(len(x), -1)

    def tell(i: int) -> str:
        at = int(np.flatnonzero(~np.isfinite(flat[i]))[0])
        return f"{place(i)}, column '{columns[at]}'" if columns else place(i)

    gaps = np.flatnonzero(~np.isfinite(flat).all(1))
    notes.wrong_at("missing or infinite value; fill it in or leave the sample out", gaps, tell)


def split_parts(parts: list[Part], y: Whole, reading: Reading) -> tuple[NDArray[np.bool_], bool]:
    """(N,) which samples are for testing, and whether that was decided here."""
    tests = []
    for part, own in zip(parts, np.split(y, np.cumsum([len(part.x) for part in parts])[:-1]), strict=True):
        if part.split is None:
            tests.append(choose_test(own, digests(part.x), reading.test_share, reading.split_seed, part.client))
        else:
            tests.append(np.full(len(own), part.split == "test"))
    return np.concatenate(tests), any(part.split is None for part in parts)


def count_clients(pooled: Pooled, notes: Notes) -> None:
    """Notes clients and classes that lack something."""
    train, test = pooled.sizes(~pooled.test), pooled.sizes(pooled.test)
    for i, name in enumerate(pooled.clients):
        if name in ("", "nan"):
            notes.wrong("sample that does not say its client", pooled.place(int(np.argmax(pooled.owner == i))))
        if train[i] == 0:
            notes.wrong("client without training samples", f"client {i} ({name})")
        elif test[i] == 0:
            notes.worth_knowing("client without test samples, so nothing is measured on it", f"client {i} ({name})")
    known = pooled.y >= 0
    pairs = np.unique(np.stack([pooled.owner[known], pooled.y[known]]), axis=1)
    of_client = np.bincount(pairs[0], minlength=len(pooled.clients))
    for lone in np.flatnonzero(of_client == 1):
        notes.worth_knowing("client with one class only", f"client {lone} ({pooled.clients[lone]})")
    for k in np.flatnonzero(np.bincount(pairs[1], minlength=len(pooled.classes)) == 0):
        notes.worth_knowing("class that nobody has", f"class {k} ({pooled.classes[k]})")
