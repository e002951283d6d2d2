"""What a reader is asked for, and what it brings back: parts of clients, and notes of what is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError, unknown

Array = NDArray[Any]

MISSING = np.iinfo(np.int64).min  # a label that is not there; among names of classes it is ""
EXAMPLES = 5  # places that are named for each kind of problem
LABELS = ("label", "labels", "y", "target", "class", "diagnosis")  # columns that are taken for the label
CLIENTS = ("client", "client_id", "user", "user_id", "writer", "writer_id", "hospital", "site", "device")
NO_LABEL = "no label"
OUT_OF_RANGE = "label out of range"
UNREADABLE = "cannot be read"
OTHER_SHAPE = "another shape than the rest"
TEXT = "text where a number should be; make numbers of categories first, such as a column of 0 and 1 for each"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How data of one's own are read."""

    label_column: str | None = field(default=None, metadata={"help": "own tables: the column with the label"})
    client_column: str | None = field(default=None, metadata={"help": "own tables: the column that says whose it is"})
    test_share: float = field(default=0.25, metadata={"help": "own data without a test split: the share to test with"})
    split_seed: int = field(default=0, metadata={"help": "own data without a test split: the seed of the split"})

    def check(self) -> None:
        if not 0 < self.test_share < 1:
            raise CoterieError(f"test_share is {self.test_share}: it must be more than 0 and less than 1")
        if self.split_seed < 0:
            raise CoterieError(f"split_seed is {self.split_seed}: it must be at least 0")


class Part(NamedTuple):
    """Samples of one client, of one split or not yet divided."""

    client: str
    split: str | None  # train, test; None: to be divided
    x: Array  # (n, ...) as in the file
    y: Array  # (n,) int64, or names of classes
    place: Callable[[int], str]  # where a sample stands: file and row


class Found(NamedTuple):
    form: str  # what kind of data it is, in words
    parts: list[Part]
    classes: tuple[str, ...] | None = None  # their names, where the data say them
    columns: tuple[str, ...] = ()  # names of the features of a table


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


def find_column(names: Sequence[str], named: str | None, usual: Sequence[str], what: str, path: Path) -> str:
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


def by_client(x: Array, y: Array, owners: Array, split: str | None, place: Callable[[int], str]) -> list[Part]:
    """A part for each client, from samples that say whose they are."""
    names, owner, counts = np.unique(as_names(owners, place), return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])
    made = [Part(str(names[i]), split, x[own], y[own], _of_rows(place, own)) for i, own in enumerate(rows) if len(own)]
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


def whole_labels(values: Array, notes: Notes, place: Callable[[int], str]) -> Array:
    """Labels as int64 or as names: numbers must be whole, NaN stands for none."""
    if values.dtype.kind in "iub":
        if values.dtype == np.uint64:
            values = np.minimum(values, np.uint64(2**62))
        return values.astype(np.int64)
    if values.dtype.kind != "f":
        return as_names(values, place)
    gone = np.isnan(values)
    fine = gone | ((np.abs(values) < 2**53) & (values == np.trunc(values)))
    notes.wrong_at(OUT_OF_RANGE, np.flatnonzero(~fine), lambda i: f"{place(i)}: {values[i]:g} is not a whole number")
    return np.where(gone | ~fine, 0, values).astype(np.int64) + np.where(gone, MISSING, np.where(fine, 0, -1))


def upright(x: Array) -> Array:
    """Samples (n, ...) with channels first: (n, H, W) and (n, H, W, 3) become images, (n,) a table of one column."""
    if x.ndim in (1, 3):
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        return np.moveaxis(x, 3, 1)
    return x
