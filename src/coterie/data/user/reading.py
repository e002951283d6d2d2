"""What a reader is asked for, and what it returns: parts of clients, and notes of what is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.data import Column
from coterie.core.errors import CoterieError, unknown
from coterie.core.typed import check_types

Array = NDArray[Any]

MISSING = np.iinfo(np.int64).min  # a label that is not there; among names of classes it is ""
EXAMPLES = 5  # places that are named for each kind of problem
LABELS = ("label", "labels", "y", "target", "class", "diagnosis")  # columns that are taken for the label
CLIENTS = ("client", "client_id", "user", "user_id", "writer", "writer_id", "hospital", "site", "device")
NO_LABEL = "no label"
OUT_OF_RANGE = "label out of range"
UNREADABLE = "cannot be read"
OTHER_SHAPE = "another shape than the rest"
INPUTS = ("auto", "image", "series", "values", "tokens")
FILLS = ("refuse", "median")
ONE_LABEL = "Coterie trains classifiers with one label per sample, a whole number from 0 or a name"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How data of one's own are read."""

    label_column: str | None = field(default=None, metadata={"help": "own tables: the column with the label"})
    client_column: str | None = field(default=None, metadata={"help": "own tables: the column with the client's name"})
    group_column: str | None = field(
        default=None,
        metadata={"help": "own tables: rows with the same value (patient, recording) stay on one side of every split"},
    )
    drop_column: str | None = field(
        default=None, metadata={"help": "own tables: columns that are not used; several with commas"}
    )
    input: str = field(
        default="auto",
        metadata={
            "help": "own data: what a sample is: image, series, values (numbers that are not scaled), tokens (whole "
            "numbers for an embedding), or auto (bytes with three axes are images, other whole numbers are tokens)"
        },
    )
    missing: str = field(
        default="refuse",
        metadata={"help": "own tables: missing values: refuse them, or fill them with the training median"},
    )
    channel_axis: int | None = field(
        default=None,
        metadata={"help": "axis of one sample along which --normalise auto takes statistics: (C, T) 0, (T, F) 1"},
    )
    test_share: float = field(default=0.25, metadata={"help": "own data without a test split: the share to test with"})
    split_seed: int = field(default=0, metadata={"help": "own data without a test split: the seed of the split"})

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))

    def check(self) -> None:
        if not 0 < self.test_share < 1:
            raise CoterieError(f"test_share is {self.test_share}: it must be more than 0 and less than 1")
        if self.split_seed < 0:
            raise CoterieError(f"split_seed is {self.split_seed}: it must be at least 0")
        if self.input not in INPUTS:
            raise unknown("input", self.input, INPUTS)
        if self.missing not in FILLS:
            raise unknown("way to treat missing values", self.missing, FILLS)

    def refuse_columns(self, path: Path, form: str) -> None:
        """Refuse names of columns for data without columns."""
        for name in ("label_column", "client_column", "group_column", "drop_column"):
            if getattr(self, name) is not None:
                raise CoterieError(f"{path}: --{name.replace('_', '-')} is for tables, not for {form}")

    @property
    def dropped(self) -> list[str]:
        return [name.strip() for name in (self.drop_column or "").split(",") if name.strip()]


class Part(NamedTuple):
    """Samples of one client, of one split or not yet divided."""

    client: str
    split: str | None  # train, test; None: to be divided
    x: Array  # (n, ...) as in the file
    y: Array  # (n,) int64, or names of classes
    place: Callable[[int], str]  # where a sample stands: file and row
    group: Array | None = None  # (n,) names of what must not be divided between training and test


class Found(NamedTuple):
    form: str  # what kind of data it is, in words
    parts: list[Part]
    classes: tuple[str, ...] | None = None  # their names, where the data say them
    columns: tuple[Column, ...] = ()  # of a table


@dataclass
class Problem:
    what: str
    stops: bool  # whether training is refused
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.examples)} more" if self.count > len(self.examples) else ""
        return f"{self.what}: {'; '.join(self.examples)}{more}"


@dataclass
class Notes:
    """What a reader noticed. A kind of problem is kept once, with a count and the first places."""

    problems: dict[str, Problem] = field(default_factory=dict)
    room: int = field(default_factory=lambda: memory() // 4)  # bytes of samples that may still be read
    done: list[str] = field(default_factory=list)  # how all samples were understood, where that may surprise

    def wrong(self, what: str, where: str, stops: bool = True) -> None:
        problem = self.problems.setdefault(what, Problem(what, stops))
        problem.count += 1
        if len(problem.examples) < EXAMPLES:
            problem.examples.append(where)

    def wrong_at(self, what: str, rows: Array, tell: Callable[[int], str], stops: bool = True) -> None:
        """Of so many samples; only the first few are told."""
        for row in rows[:EXAMPLES].tolist():
            self.wrong(what, tell(row), stops)
        if len(rows) > EXAMPLES:
            self.problems[what].count += len(rows) - EXAMPLES

    def worth_knowing(self, what: str, where: str) -> None:
        self.wrong(what, where, stops=False)

    def add(self, other: Notes) -> None:
        """What was noted elsewhere, with the room left there."""
        self.room = other.room
        for what, problem in other.problems.items():
            own = self.problems.setdefault(what, Problem(what, problem.stops))
            own.count += problem.count
            own.examples = (own.examples + problem.examples)[:EXAMPLES]

    def need(self, size: int, path: Path) -> None:
        """Before so many bytes are read."""
        self.room -= size
        if self.room < 0:
            raise CoterieError(f"{path}: with this, the samples take more than a quarter of the memory of this machine")

    @property
    def errors(self) -> list[Problem]:
        return [p for p in self.problems.values() if p.stops]


def memory() -> int:
    """Bytes that this machine has; where it does not tell, 16 GiB."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**34


def in_order(name: str) -> list[Any]:
    """Sorts client2 before client10."""
    return [int(piece) if at % 2 else piece for at, piece in enumerate(re.split(r"([0-9]{1,18})", name))]


def readable(name: str) -> str:
    """A file's name as text that can be written and printed, whatever its bytes are."""
    return os.fsencode(name).decode("utf-8", "replace")


def entries(folder: Path) -> list[Path]:
    """What is in a folder, in order, without hidden files."""
    try:
        return sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=lambda p: in_order(p.name))
    except OSError as error:
        raise CoterieError(f"{folder}: cannot be read ({error.strerror})") from None


def find_column(names: Sequence[str], named: str | None, usual: Sequence[str], what: str, path: Path | str) -> str:
    """The column that the user named, or the only one with a usual name."""
    if named is not None:
        if named not in names:
            raise CoterieError(f"{path}: {unknown(f'column for the {what}', named, names)}")
        return named
    found = [name for name in names if name.lower() in usual]
    if len(found) != 1:
        listed = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
        raise CoterieError(f"{path}: which column is the {what}? Name it with --{what}-column; there are: {listed}")
    return found[0]


def by_client(
    x: Array,
    y: Array,
    owners: Array,
    split: str | None,
    place: Callable[[int], str],
    group: Array | None = None,
) -> list[Part]:
    """A part for each client, from samples that say whose they are."""
    names, owner, counts = np.unique(as_names(owners, place), return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])
    made = [
        Part(str(names[i]), split, x[own], y[own], _of_rows(place, own), None if group is None else group[own])
        for i, own in enumerate(rows)
        if len(own)
    ]
    return sorted(made, key=lambda part: in_order(part.client))


def _of_rows(place: Callable[[int], str], rows: Array) -> Callable[[int], str]:
    return lambda i: place(int(rows[i]))


def as_names(values: Array, place: Callable[[int], str]) -> Array:
    """Numbers or text as text."""
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "iubfU":
        raise CoterieError(f"{place(0)}: '{values.dtype}' is no type of labels or names of clients")
    return values.astype(str)


def as_text(values: Sequence[str], notes: Notes, path: Path) -> Array:
    """An array of names, each as wide as the longest: that is checked against the memory first."""
    notes.need(4 * max(map(len, values), default=0) * len(values), path)
    return np.array(values, dtype=str)


def whole_labels(values: Array, notes: Notes, place: Callable[[int], str]) -> Array:
    """(n,) labels as int64 or as names: numbers must be whole, NaN stands for no label."""
    seen = f"labels of type {values.dtype}, shape {values.shape}"
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        kind = "several labels per sample" if values.ndim == 2 else "masks"
        raise CoterieError(f"{place(0)}: {seen}: {kind} are not supported. {ONE_LABEL}")
    if values.dtype.kind in "iub":
        if values.dtype == np.uint64:
            values = np.minimum(values, np.uint64(2**62))
        return values.astype(np.int64)
    if values.dtype.kind == "O":
        return object_labels(values, seen, place)
    if values.dtype.kind not in "fUS":
        raise CoterieError(f"{place(0)}: {seen}. {ONE_LABEL}")
    if values.dtype.kind != "f":
        return as_names(values, place)
    gone = np.isnan(values)
    fine = gone | ((np.abs(values) < 2**53) & (values == np.trunc(values)))
    notes.wrong_at(
        f"target that is not a class; {ONE_LABEL}",
        np.flatnonzero(~fine),
        lambda i: f"{place(i)}: {values[i]:g} ({seen})",
    )
    return np.where(gone | ~fine, 0, values).astype(np.int64) + np.where(gone, MISSING, np.where(fine, 0, -1))


def object_labels(values: Array, seen: str, place: Callable[[int], str]) -> Array:
    """Text in which None or NaN stands for no label."""
    names = []
    for i, value in enumerate(values):
        if value is None or (isinstance(value, float) and np.isnan(value)):
            names.append("")
        elif isinstance(value, (str, int, np.integer)):
            names.append(str(value))
        else:
            raise CoterieError(f"{place(i)}: a label of type {type(value).__name__} ({seen}). {ONE_LABEL}")
    return np.array(names, dtype=str)
