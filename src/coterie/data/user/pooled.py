"""Pool the parts of all clients: one shape, one type, integer labels, a training and a test split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.data import Column, Transform
from coterie.core.errors import CoterieError
from coterie.core.task import Task
from coterie.core.tasks import task_class
from coterie.data.dataset import Dataset
from coterie.data.user.coding import check_coding
from coterie.data.user.inputs import as_input
from coterie.data.user.labels import MOST_CLASSES, Whole, converted, guessed
from coterie.data.user.reading import (
    EXAMPLES,
    OTHER_SHAPE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    shaped,
)
from coterie.data.user.several_inputs import alike, has_fields, inputs_of, packed
from coterie.data.user.split import divided_groups, keep_categories, split_parts

GAPS = "missing values; fill them in, or train with --missing median"
GUESSED = "guessed"  # in the record of a dataset: the task was not named


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
    task: type[Task]
    classes: tuple[str, ...]  # names of classes, targets or labels; empty: they have none
    x: Array  # (N, ...) uint8, int64, float16 or float32; several inputs: (N,), with one field for each
    y: Array  # (N, ...) in the type of the task; -1: no class
    owner: Whole  # (N,)
    test: NDArray[np.bool_]  # (N,)
    divided: bool  # whether the split was made here rather than given
    place: Places
    columns: tuple[Column, ...] = ()  # of a table
    group: Whole | None = None  # (N,) a group is never split
    done: tuple[str, ...] = ()  # how the samples were read, if that may surprise

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample as a federation holds it: several inputs are packed."""
        return (self.x.dtype.itemsize,) if has_fields(self.x) else self.x.shape[1:]

    @property
    def strata(self) -> Array:
        """(N,) the class of each sample; 0 for tasks without one."""
        return self.y if self.task.one_class else np.zeros(len(self.y), np.int64)

    def sizes(self, chosen: NDArray[np.bool_]) -> Whole:
        """(m,) number of chosen samples per client."""
        return np.bincount(self.owner[chosen], minlength=len(self.clients))

    def dataset(self, name: str, reading: Reading) -> Dataset:
        x, y = packed(self.x) if has_fields(self.x) else torch.from_numpy(self.x), torch.from_numpy(self.y)
        owner, test = torch.from_numpy(self.owner), torch.from_numpy(self.test)
        record: dict[str, Any] = {"reading": list(self.done)} if self.done else {}
        if reading.task is None:
            record["task"] = GUESSED
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
            Transform(columns=self.columns, inputs=inputs_of(self.x)),
            owners=(owner[~test], owner[test]),
            groups=None if group is None else (group[~test], group[test]),
            client_names=self.clients,
            record=record,
            task=self.task,
        )


def pool(found: Found, reading: Reading, notes: Notes, where: str, task: type[Task] | None = None) -> Pooled:
    """Pool all usable samples and report the others. where: file or folder, for error messages.

    task: default: that of `reading`, or guessed from the labels.
    """
    names = tuple(dict.fromkeys(part.client for part in found.parts))
    parts = same_kind([part for part in found.parts if len(part.x)], found.columns, reading, notes)
    if not parts:
        raise CoterieError(f"{where}: no samples" + "".join(f"; {problem}" for problem in notes.errors))
    x = np.concatenate([part.x for part in parts])
    index = {name: i for i, name in enumerate(names)}
    owner = np.repeat([index[part.client] for part in parts], [len(part.x) for part in parts])
    place = Places(parts)
    kind = task or (guessed(parts, found.classes) if reading.task is None else task_class(reading.task))
    names_of_labels = found.classes if kind.one_class else found.classes or found.labels or None
    y, classes = converted(parts, kind, names_of_labels, place, notes)
    if kind.one_class and len(classes) > MOST_CLASSES:
        raise CoterieError(f"{where}: {len(classes):,} classes are too many; is this the right label column?")
    columns = check_values(x, found.columns, reading, place, notes)
    group = joined_groups(parts, place, notes)
    strata = y if kind.one_class else np.zeros(len(y), np.int64)
    test, divided = split_parts(parts, strata, group, reading)
    if group is not None:
        divided_groups(group, test, place, notes)
    given = np.repeat([part.split is not None for part in parts], [len(part.x) for part in parts])
    test = keep_categories(x, columns, group, test, given, place, notes)
    about = (found.form, names, kind, classes)
    pooled = Pooled(*about, x, y, owner, test, divided, place, columns, group, tuple(notes.done))
    count_clients(pooled, notes)
    check_coding(pooled, notes)
    return pooled


def same_kind(parts: list[Part], columns: tuple[Column, ...], reading: Reading, notes: Notes) -> list[Part]:
    """Keep the parts with the most frequent shape and type; report the others."""
    texts = [column.name for column in columns if column.categories]
    if columns and reading.input == "tokens" and texts:
        raise CoterieError(f"--input tokens takes whole numbers; column '{texts[0]}' holds text")
    if any(has_fields(part.x) for part in parts):
        return alike(parts, reading.input)
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
    if not pooled.task.one_class:
        return
    known = pooled.y >= 0
    pairs = np.unique(np.stack([pooled.owner[known], pooled.y[known]]), axis=1)
    of_client = np.bincount(pairs[0], minlength=len(pooled.clients))
    for lone in np.flatnonzero(of_client == 1):
        notes.worth_knowing("client with one class only", f"client {lone} ({pooled.clients[lone]})")
    for k in np.flatnonzero(np.bincount(pairs[1], minlength=len(pooled.classes)) == 0):
        notes.worth_knowing("class without samples", f"class {k} ({pooled.classes[k]})")


def check_values(
    x: Array, columns: tuple[Column, ...], reading: Reading, place: Callable[[int], str], notes: Notes
) -> tuple[Column, ...]:
    """Report missing and infinite values. Returns the columns; unnamed ones get names if gaps are filled."""
    if x.dtype.kind != "f":
        return columns
    flat = x.reshape(len(x), -1)

    def describe(i: int) -> str:
        at = int(np.flatnonzero(~np.isfinite(flat[i]))[0])
        return f"{place(i)}, column '{columns[at].name}'" if columns else place(i)

    notes.wrong_at("infinite value", np.flatnonzero(np.isinf(flat).any(1)), describe)
    gaps = np.isnan(flat)
    if not gaps.any():
        return columns
    if x.ndim > 2:
        notes.wrong_at("missing value; fill it in or leave the sample out", np.flatnonzero(gaps.any(1)), place)
    elif reading.missing == "refuse":
        for at in np.flatnonzero(gaps.any(0)).tolist():
            name = columns[at].name if columns else str(at)
            rows = np.flatnonzero(gaps[:, at])
            notes.wrong(GAPS, f"column '{name}': {len(rows):,} missing, the first in {place(int(rows[0]))}")
        notes.problems[GAPS].examples = notes.problems[GAPS].examples[:EXAMPLES]
    elif not columns:
        columns = tuple(Column(f"x{i}") for i in range(x.shape[1]))
    return columns
