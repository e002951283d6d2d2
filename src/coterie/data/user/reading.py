"""Options and results of readers: the parts of all clients, and the problems found in them."""

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
from coterie.core.names import separated
from coterie.core.validation import check_fields

Array = NDArray[Any]

MISSING = np.iinfo(np.int64).min  # a missing label; "" among class names
EXAMPLES = 5  # places reported for each kind of problem
LABELS = ("label", "labels", "y", "target", "class", "diagnosis")  # default names of the label column
CLIENTS = ("client", "client_id", "user", "user_id", "writer", "writer_id", "hospital", "site", "device")
NO_LABEL = "no label"
OUT_OF_RANGE = "label out of range"
UNREADABLE = "cannot be read"
OTHER_SHAPE = "different shape than the rest"
INPUTS = ("auto", "image", "series", "values", "tokens")
FILLS = ("refuse", "median")
YES_NO = {"yes": 1, "no": 0, "y": 1, "n": 0, "true": 1, "false": 0, "1": 1, "0": 0} | dict.fromkeys(
    ["", "nan", "none"], np.nan
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read users' data."""

    label_column: str | None = field(
        default=None, metadata={"help": "label column of your table; several are separated by commas"}
    )
    task: str | None = field(
        default=None,
        metadata={
            "help": "classification, multi-label, regression, segmentation, next-token, or package.module:Class for "
            "your own; default: by the labels"
        },
    )
    task_args: str | None = field(
        default=None,
        metadata={"help": "options of the task, such as loss=huber or label_smoothing=0.1,class_weights=[1,3]"},
    )
    metric: str | None = field(
        default=None,
        metadata={"help": "metric of the task that decides and is shown, such as auroc or mae; default: its first"},
    )
    client_column: str | None = field(default=None, metadata={"help": "client column of your table"})
    group_column: str | None = field(
        default=None,
        metadata={"help": "group column of your table (patient, recording): a group stays on one side of every split"},
    )
    drop_column: str | None = field(
        default=None, metadata={"help": "columns of your table to leave out, separated by commas"}
    )
    input: str = field(
        default="auto",
        metadata={
            "help": "type of your samples: image, series, values (numbers, not scaled), tokens (integers for an "
            "embedding), or auto (bytes with three axes are images, other integers are tokens)"
        },
    )
    missing: str = field(
        default="refuse",
        metadata={"help": "missing values in your tables: refuse, or fill with the training median"},
    )
    channel_axis: int | None = field(
        default=None,
        metadata={"help": "channel axis of one sample for --normalise auto: 0 for (C, T), 1 for (T, F)"},
    )
    resize: int | None = field(
        default=None,
        metadata={
            "help": "side of the images in pixels: the shorter side is resized to it, then the center is cropped",
            "low": 1,
        },
    )
    test_share: float = field(
        default=0.25,
        metadata={"help": "test samples' share, if your data have no test split", "above": 0, "below": 1},
    )
    split_seed: int = field(default=0, metadata={"help": "seed of that test split", "low": 0})

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))

    def check(self) -> None:
        if self.input not in INPUTS:
            raise unknown("input", self.input, INPUTS)
        if self.missing not in FILLS:
            raise unknown("--missing value", self.missing, FILLS)

    def refuse_columns(self, path: Path, form: str) -> None:
        """Raise an error if a column is named for data without columns."""
        for name in ("label_column", "client_column", "group_column", "drop_column"):
            if getattr(self, name) is not None:
                raise CoterieError(f"{path}: --{name.replace('_', '-')} is for tables, not for {form}")

    @property
    def dropped(self) -> list[str]:
        return separated(self.drop_column or "")


class Part(NamedTuple):
    """Samples of one client, from one split or not yet split."""

    client: str
    split: str | None  # train, test; None: not yet split
    x: Array  # (n, ...) as in the file
    y: Array  # (n, ...) int64, float64 or text, as in the file
    place: Callable[[int], str]  # file and row of a sample
    group: Array | None = None  # (n,) group names; a group is not divided between training and test


class Found(NamedTuple):
    form: str  # the format in words
    parts: list[Part]
    classes: tuple[str, ...] | None = None  # names, if the data define them
    labels: tuple[str, ...] = ()  # names of the label columns of a table
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
    """Problems that a reader found: each kind once, with a count and the first places."""

    problems: dict[str, Problem] = field(default_factory=dict)
    room: int = field(default_factory=lambda: memory() // 4)  # bytes that may still be read
    done: list[str] = field(default_factory=list)  # how all samples were read, if that may surprise

    def wrong(self, what: str, where: str, stops: bool = True) -> None:
        problem = self.problems.setdefault(what, Problem(what, stops))
        problem.count += 1
        if len(problem.examples) < EXAMPLES:
            problem.examples.append(where)

    def wrong_at(self, what: str, rows: Array, describe: Callable[[int], str], stops: bool = True) -> None:
        """Report a problem of several samples and describe the first few."""
        for row in rows[:EXAMPLES].tolist():
            self.wrong(what, describe(row), stops)
        if len(rows) > EXAMPLES:
            self.problems[what].count += len(rows) - EXAMPLES

    def worth_knowing(self, what: str, where: str) -> None:
        self.wrong(what, where, stops=False)

    def add(self, other: Notes) -> None:
        """Merge other notes, and continue with their remaining room."""
        self.room = other.room
        for what, problem in other.problems.items():
            own = self.problems.setdefault(what, Problem(what, problem.stops))
            own.count += problem.count
            own.examples = (own.examples + problem.examples)[:EXAMPLES]

    def need(self, size: int, path: Path) -> None:
        """Reserve memory before `size` bytes are read."""
        self.room -= size
        if self.room < 0:
            raise CoterieError(f"{path}: the samples would take more than a quarter of the memory of this machine")

    @property
    def errors(self) -> list[Problem]:
        return [p for p in self.problems.values() if p.stops]


def memory() -> int:
    """Bytes of physical memory; 16 GiB if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**34


def in_order(name: str) -> list[Any]:
    """Natural sort key: client2 before client10."""
    return [int(piece) if at % 2 else piece for at, piece in enumerate(re.split(r"([0-9]{1,18})", name))]


def readable(name: str) -> str:
    """A file name as valid Unicode text."""
    return os.fsencode(name).decode("utf-8", "replace")


def entries(folder: Path) -> list[Path]:
    """The entries of a folder in natural order, without hidden files."""
    try:
        return sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=lambda p: in_order(p.name))
    except OSError as error:
        raise CoterieError(f"{folder}: cannot be read ({error.strerror})") from None


def find_column(names: Sequence[str], named: str | None, common: Sequence[str], what: str, path: Path | str) -> str:
    """The named column, or the only one with a common name."""
    if named is not None:
        if named not in names:
            raise CoterieError(f"{path}: {unknown(f'column for the {what}', named, names)}")
        return named
    found = [name for name in names if name.lower() in common]
    if len(found) != 1:
        listed = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
        raise CoterieError(f"{path}: which column is the {what}? Name it with --{what}-column; columns: {listed}")
    return found[0]


def by_client(
    x: Array,
    y: Array,
    owners: Array,
    split: str | None,
    place: Callable[[int], str],
    group: Array | None = None,
) -> list[Part]:
    """Group samples by owner: one part per client."""
    names, owner, counts = np.unique(as_names(owners, place), return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])
    made = [
        Part(str(names[i]), split, x[own], y[own], _of_rows(place, own), None if group is None else group[own])
        for i, own in enumerate(rows)
        if len(own)
    ]
    return sorted(made, key=lambda part: in_order(part.client))


def rows_in(where: object, unit: str = "row") -> Callable[[int], str]:
    return lambda i: f"{where}, {unit} {i}"


def shaped(shape: tuple[int, ...], kind: object) -> str:
    return f"{' x '.join(map(str, shape))} {kind}"


def _of_rows(place: Callable[[int], str], rows: Array) -> Callable[[int], str]:
    return lambda i: place(int(rows[i]))


def as_names(values: Array, place: Callable[[int], str]) -> Array:
    """Convert numbers, bytes or text to text."""
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "iubfU":
        raise CoterieError(f"{place(0)}: labels and client names cannot have type '{values.dtype}'")
    return values.astype(str)


def as_text(values: Sequence[str], notes: Notes, path: Path) -> Array:
    """An array of names, after a check of its memory: each is as wide as the longest."""
    notes.need(4 * max(map(len, values), default=0) * len(values), path)
    return np.array(values, dtype=str)


def joined_columns(columns: Sequence[Array], names: Sequence[str], place: Callable[[int], str]) -> Array | None:
    """(n,) the labels of one column, (n, T) of several, None of none."""
    if len(columns) > 1:
        columns = [numbers(column, name, place) for column, name in zip(columns, names, strict=True)]
    return np.stack(columns, 1) if len(columns) > 1 else columns[0] if columns else None


def numbers(column: Array, name: str, place: Callable[[int], str]) -> Array:
    """(n,) one of several label columns, in which yes or true is 1 and no or false is 0."""
    if column.dtype.kind in "iuf":
        return column
    words = [str(word).strip().lower() for word in column.tolist()]
    row = next((i for i, word in enumerate(words) if word not in YES_NO), None)
    if row is not None:
        raise CoterieError(
            f"{place(row)}: label column '{name}' holds text ('{column[row]}'); several label columns must hold "
            "numbers, or yes and no: write 1 for yes and 0 for no"
        )
    return np.array([YES_NO[word] for word in words], np.float64)
