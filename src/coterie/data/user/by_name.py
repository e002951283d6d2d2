"""Read a table by the column names that a model was trained with."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.data import Column
from coterie.core.errors import CoterieError, unknown
from coterie.data.user.arrow_columns import parquet_names, read_parquet
from coterie.data.user.bounds import Unusable
from coterie.data.user.columnar import frame_of_columns, names_of_columns
from coterie.data.user.csv_files import csv_lines, csv_names, read_csv
from coterie.data.user.frames import NOTHING, Columns, Frame, number
from coterie.data.user.reading import LABELS, Array, Notes
from coterie.data.user.tables import KINDS, is_csv, label_columns


class Roles(NamedTuple):
    """Columns that are not samples."""

    label: str | None  # as the user names them
    group: str | None
    labels: tuple[str, ...]  # of the training data


class Table(NamedTuple):
    """Raw samples in the order and coding of the requested columns."""

    x: Tensor  # (n, F) float32; NaN: missing; text: index of the category
    labels: Array | None  # (n, ...) numbers or text as in the table, if it has label columns
    by_position: bool  # whether the file has no header and was read by position
    place: Callable[[int], str]  # file and line of a row
    groups: Array | None = None  # (n,) names, if a group column was requested


def read_table_by(
    columns: Sequence[Column],
    source: str | os.PathLike[str] | Any,
    *,
    label_column: str | None = None,
    group_column: str | None = None,
    ignored: Collection[str] = (),
    labels: Sequence[str] = (),
) -> Table:
    """Read a CSV or Parquet file, a pandas DataFrame or a dictionary of columns, by the names of its columns.

    columns: those of `Transform.columns`. Raises an error that names the column if one is missing, unknown or
    duplicated, has a category that training did not have, text among numbers, or a missing value but no fill value.
    A CSV file without a header is read by position if its values fit; `by_position` is True then.
    label_column: default: `labels` if the table has all of them, else the only column with a common label name, if any;
    several are separated by commas. group_column: rows with the same value
    belong together. ignored: columns that may exist and are not used, such as the client column.
    """
    notes = Notes()
    where = str(source) if isinstance(source, (str, os.PathLike)) else "the table"
    try:
        frame, by_position = _read(
            columns, source, where, Roles(label_column, group_column, tuple(labels)), ignored, notes
        )
    except Unusable as error:
        raise CoterieError(f"{where}: {error}") from None
    x = in_coding(columns, frame)
    if notes.errors:
        raise CoterieError("; ".join(map(str, notes.errors)))
    if not len(x):
        raise CoterieError(f"{where}: no rows")
    return Table(torch.from_numpy(x), frame.y, by_position, frame.place, frame.group)


def _read(
    columns: Sequence[Column], source: Any, where: str, named: Roles, ignored: Collection[str], notes: Notes
) -> tuple[Frame, bool]:
    names = tuple(column.name for column in columns)
    if not isinstance(source, (str, os.PathLike)):
        given = names_of_columns(source, where)
        return frame_of_columns(source, wanted(names, given, named, ignored, where), notes, where), False
    path = Path(os.path.expanduser(source))
    if not path.is_file():
        raise CoterieError(f"{path}: no such file")
    if path.suffix.lower() not in KINDS:
        raise CoterieError(f"{path}: a table must be a {' or '.join(KINDS)} file")
    notes.need(path.stat().st_size, path)
    if not is_csv(path):
        return read_parquet(path, wanted(names, parquet_names(path), named, ignored, where), notes), False
    text = [i for i, column in enumerate(columns) if column.categories]
    first = next(csv_lines(path))[1]
    header = bool({*first} & {*names})  # names may be numbers
    if not header and len(first) == len(columns) and all(map(fits, first, columns)):
        return read_csv(path, Columns((), None, names), notes, text, header=names), True
    if not header and all(cell and number(cell) is not None for cell in first):
        width = f"{len(first)} columns instead of {len(columns)}"
        found = width if len(first) != len(columns) else "values that do not fit the columns"
        raise CoterieError(f"{path}: no header, and {found}: {', '.join(names[:30])}")
    return read_csv(path, wanted(names, csv_names(path, names), named, ignored, where), notes, text), False


def wanted(names: tuple[str, ...], given: Sequence[str], named: Roles, ignored: Collection[str], where: str) -> Columns:
    """Choose the columns to read among the given ones."""
    label, group, usual = named
    if group is not None and group not in given:
        raise CoterieError(f"{where}: {unknown('group column', group, given)}")
    common = [name for name in given if name not in (*names, *ignored, group) and name.lower() in LABELS]
    labels = tuple(common) if len(common) == 1 else ()
    labels = usual if usual and set(usual) <= set(given) else labels
    if label is not None:
        labels = label_columns(given, label, where)
    lacks = [name for name in names if name not in given]
    more = [name for name in given if name not in (*names, *labels, group, *ignored)]
    if lacks or more:
        problems = [
            f"{shown(which)} {word} {where}" for word, which in (("missing in", lacks), ("unknown in", more)) if which
        ]
        hint = "" if lacks else "; --drop-column leaves columns out, --label-column names the label"
        problem = "; ".join(problems)
        raise CoterieError(f"{problem[0].upper()}{problem[1:]} (expected: {', '.join(names[:30])}){hint}")
    return Columns(labels, None, names, group)


def shown(names: Sequence[str], most: int = 10) -> str:
    """Such as: columns 'a', 'b' are."""
    listed = ", ".join(f"'{name}'" for name in names[:most]) + (", ..." if len(names) > most else "")
    return f"column {listed} is" if len(names) == 1 else f"columns {listed} are"


def fits(cell: str, column: Column) -> bool:
    """Whether a cell of the first line is a value of this column."""
    if column.categories:
        return cell in column.categories or cell.lower() in NOTHING
    return number(cell) is not None


def in_coding(columns: Sequence[Column], frame: Frame) -> Array:
    """(n, F) with categories as indices; errors name column and value."""
    x = frame.x.copy()
    for i, column in enumerate(columns):
        values = x[:, i]
        gaps = np.isnan(values)
        if gaps.any() and column.fill is None:
            row = int(np.flatnonzero(gaps)[0])
            raise CoterieError(
                f"{frame.place(row)}: column '{column.name}' has no value, and this model was trained without missing "
                "values; fill it in, or train with --missing median"
            )
        if not np.isfinite(values[~gaps]).all():
            row = int(np.flatnonzero(np.isinf(values))[0])
            raise CoterieError(f"{frame.place(row)}: column '{column.name}' has an infinite value")
        found = frame.texts.get(i)
        if found is None and column.categories and not gaps.all():
            found, values = numbers_as_text(values, gaps)
        if found is None:
            continue
        if found and not column.categories:
            row = first_text(frame, i, found)
            text = found[int(frame.x[row, i])]
            raise CoterieError(f"{frame.place(row)}: column '{column.name}' holds numbers, not {text[:30]!r}")
        x[:, i] = coded(column, found, values, frame.place)
    return x


def first_text(frame: Frame, column: int, found: Sequence[str]) -> int:
    """The first row with a text that is not a number."""
    texts = [at for at, value in enumerate(found) if number(value) is None]
    return int(np.flatnonzero(np.isin(frame.x[:, column], texts))[0])


def numbers_as_text(values: Array, gaps: Array) -> tuple[list[str], Array]:
    """Convert numbers in a column of categories to text, such as 3 to '3'."""
    distinct, at = np.unique(values[~gaps], return_inverse=True)
    codes = np.full(len(values), np.nan, np.float32)
    codes[~gaps] = at.reshape(-1)
    return [f"{value:g}" for value in distinct], codes


def coded(column: Column, found: Sequence[str], values: Array, place: Callable[[int], str]) -> Array:
    position: dict[str, float] = {name: i for i, name in enumerate(column.categories)}
    table = np.array([position.get(text, position.get(shortest(text), -1)) for text in found] or [0], np.float32)
    gaps = np.isnan(values)
    made = np.where(gaps, np.nan, table[np.where(gaps, 0, values).astype(np.int64)])
    if (made == -1).any():
        row = int(np.flatnonzero(made == -1)[0])
        text = found[int(values[row])]
        raise CoterieError(f"{place(row)}: {unknown(f'category of column {column.name!r}', text, column.categories)}")
    return made


def shortest(text: str) -> str:
    """A number in its shortest form, such as 3 for 3.0; other text unchanged."""
    value = number(text)
    return text if value is None else f"{value:g}"
