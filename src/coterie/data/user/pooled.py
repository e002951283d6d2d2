"""Pool the parts of all clients: one shape, one type, integer labels, a training and a test split."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.data import Column, Transform
from coterie.core.errors import CoterieError
from coterie.data.dataset import Dataset
from coterie.data.user.coding import check_coding
from coterie.data.user.gaps import check_values
from coterie.data.user.inputs import as_input
from coterie.data.user.reading import (
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
    shaped,
)
from coterie.data.user.split import divided_groups, keep_categories, split_parts

MOST_CLASSES = 10_000
Whole = NDArray[np.int64]


class Places:
    """Maps a sample to its file and row."""

    def __init__(self, parts: list[Part]) -> None:
        self.places = [part.place for part in parts]
        self.starts = np.cumsum([0, *(len(part.x) for part in parts[:-1])])

    def __call__(self, i: int) -> str:
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.places[part](i - int(self.starts[part]))


@dataclass(frozen=True)
class Pooled:
    form: str  # the format in words
    clients: tuple[str, ...]  # names
    classes: tuple[str, ...]
    x: Array  # (N, ...) uint8, int64, float16 or float32
    y: Whole  # (N,) -1: no class
    owner: Whole  # (N,)
    test: NDArray[np.bool_]  # (N,)
    divided: bool  # whether the split was made here rather than given
    place: Places
    columns: tuple[Column, ...] = ()  # of a table
    group: Whole | None = None  # (N,) a group is never split
    done: tuple[str, ...] = ()  # how the samples were read, if that may surprise

    def sizes(self, chosen: NDArray[np.bool_]) -> Whole:
        """(m,) number of chosen samples per client."""
        return np.bincount(self.owner[chosen], minlength=len(self.clients))

    def dataset(self, name: str, reading: Reading) -> Dataset:
        x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        owner, test = torch.from_numpy(self.owner), torch.from_numpy(self.test)
        record: dict[str, Any] = {"reading": list(self.done)} if self.done else {}
        if self.divided:
            record["split"] = {"made": "per client and class", "share": reading.test_share, "seed": reading.split_seed}
            if self.group is not None:
                record["split"]["groups"] = reading.group_column or "group"
        group = None if self.group is None else torch.from_numpy(self.group)
        return Dataset(
            name,
            x[~test],
            y[~test],
            x[test],
            y[test],
            self.classes,
            Transform(columns=self.columns),
            owners=(owner[~test], owner[test]),
            groups=None if group is None else (group[~test], group[test]),
            client_names=self.clients,
            record=record,
        )


def pool(found: Found, reading: Reading, notes: Notes, where: str) -> Pooled:
    """Pool all usable samples and report the others. where: file or folder, for error messages."""
    names = tuple(dict.fromkeys(part.client for part in found.parts))
    parts = same_kind([part for part in found.parts if len(part.x)], found.columns, reading, notes)
    if not parts:
        raise CoterieError(f"{where}: no samples" + "".join(f"; {problem}" for problem in notes.errors))
    x = np.concatenate([part.x for part in parts])
    index = {name: i for i, name in enumerate(names)}
    owner = np.repeat([index[part.client] for part in parts], [len(part.x) for part in parts])
    place = Places(parts)
    y, classes = numbered(joined_labels(parts), found.classes, place, notes)
    if len(classes) > MOST_CLASSES:
        raise CoterieError(f"{where}: {len(classes):,} classes are too many; is this the right label column?")
    columns = check_values(x, found.columns, reading, place, notes)
    group = joined_groups(parts, place, notes)
    test, divided = split_parts(parts, y, group, reading)
    if group is not None:
        divided_groups(group, test, place, notes)
    given = np.repeat([part.split is not None for part in parts], [len(part.x) for part in parts])
    test = keep_categories(x, columns, group, test, given, place, notes)
    pooled = Pooled(found.form, names, classes, x, y, owner, test, divided, place, columns, group, tuple(notes.done))
    count_clients(pooled, notes)
    check_coding(pooled, notes)
    return pooled


def same_kind(parts: list[Part], columns: tuple[Column, ...], reading: Reading, notes: Notes) -> list[Part]:
    """Keep the parts with the most frequent shape and type; report the others."""
    texts = [column.name for column in columns if column.categories]
    if columns and reading.input == "tokens" and texts:
        raise CoterieError(f"--input tokens takes whole numbers; column '{texts[0]}' holds text")
    parts = [as_input(part, reading.input, notes) for part in parts]
    kinds = Counter[tuple[Any, ...]]()
    for part in parts:
        kinds[part.x.shape[1:], part.x.dtype] += len(part.x)
    if not kinds:
        return []
    common = kinds.most_common(1)[0][0]
    for part in parts:
        if (own := (part.x.shape[1:], part.x.dtype)) != common:
            what = OTHER_SHAPE if own[0] != common[0] else "different number type than the rest"
            notes.wrong(what, f"{part.place(0)}, {len(part.x)} samples: {shaped(*own)}, most have {shaped(*common)}")
    return [part for part in parts if (part.x.shape[1:], part.x.dtype) == common]


def joined_groups(parts: list[Part], place: Places, notes: Notes) -> Whole | None:
    """(N,) group ids."""
    groups = [part.group for part in parts if part.group is not None]
    if not groups:
        return None
    if len(groups) < len(parts):
        lone = next(part for part in parts if part.group is None)
        raise CoterieError(f"{lone.place(0)}: these samples have no group, but others do")
    names, number = np.unique(np.concatenate(groups), return_inverse=True)
    notes.wrong_at("sample without a group", np.flatnonzero((names == "")[number.reshape(-1)]), place)
    return number.reshape(-1).astype(np.int64)


def joined_labels(parts: list[Part]) -> Array:
    """(N,) integers if all clients have integers, else names."""
    labels = [part.y for part in parts]
    if any(y.dtype.kind == "U" for y in labels):
        labels = [y if y.dtype.kind == "U" else np.where(y == MISSING, "", y.astype(str)) for y in labels]
    return np.concatenate(labels)


def numbered(y: Array, known: tuple[str, ...] | None, place: Places, notes: Notes) -> tuple[Whole, tuple[str, ...]]:
    """(N,) class indices, -1 for invalid labels; and the class names."""
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


def count_clients(pooled: Pooled, notes: Notes) -> None:
    """Report clients and classes without samples, and clients with one class."""
    train, test = pooled.sizes(~pooled.test), pooled.sizes(pooled.test)
    for i, name in enumerate(pooled.clients):
        if name in ("", "nan"):
            notes.wrong("sample without a client", pooled.place(int(np.argmax(pooled.owner == i))))
        if train[i] == 0:
            notes.wrong("client without training samples", f"client {i} ({name})")
        elif test[i] == 0:
            notes.worth_knowing("client without test samples, so it is not evaluated", f"client {i} ({name})")
    known = pooled.y >= 0
    pairs = np.unique(np.stack([pooled.owner[known], pooled.y[known]]), axis=1)
    of_client = np.bincount(pairs[0], minlength=len(pooled.clients))
    for lone in np.flatnonzero(of_client == 1):
        notes.worth_knowing("client with one class only", f"client {lone} ({pooled.clients[lone]})")
    for k in np.flatnonzero(np.bincount(pairs[1], minlength=len(pooled.classes)) == 0):
        notes.worth_knowing("class without samples", f"class {k} ({pooled.classes[k]})")
