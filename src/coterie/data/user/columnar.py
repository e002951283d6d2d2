"""Tables in memory: pandas DataFrames and dictionaries of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.user.frames import Columns, Frame, code, narrow
from coterie.data.user.labels import as_labels
from coterie.data.user.reading import Array, Notes, joined_columns, rows_in


def is_columnar(given: Any) -> bool:
    """Whether this is a DataFrame or a dictionary of columns."""
    if isinstance(given, Mapping):
        return bool(given) and all(map(is_column, given.values()))
    return hasattr(given, "columns") and hasattr(given, "to_numpy")


def is_column(values: Any) -> bool:
    """Whether this is a list of numbers and texts, an array of one axis or a pandas Series."""
    if isinstance(values, (list, tuple)):
        return not len(values) or all(value is None or isinstance(value, (str, float, int)) for value in values[:10])
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return hasattr(values, "to_numpy") and not hasattr(values, "columns")


def names_of_columns(given: Any, where: str) -> list[str]:
    if not is_columnar(given):
        raise CoterieError(f"{where}: expected a DataFrame or a dictionary of columns, got {type(given).__name__}")
    names = [str(name) for name in (given if isinstance(given, Mapping) else given.columns)]
    if len(set(names)) < len(names):
        raise CoterieError(f"{where}: two columns have the same name")
    return names


def frame_of_columns(given: Any, columns: Columns, notes: Notes, where: str) -> Frame:
    arrays = {str(name): as_column(given[name], f"{where}, column '{name}'") for name in given}
    lengths = {len(values) for values in arrays.values()}
    if len(lengths) > 1:
        raise CoterieError(f"{where}: columns of different lengths ({', '.join(map(str, sorted(lengths)))})")
    rows = lengths.pop() if lengths else 0
    texts: dict[int, list[str]] = {}
    x = np.empty((rows, len(columns.features)), np.float32)
    for i, name in enumerate(columns.features):
        values = arrays[name]
        if values.dtype.kind in "biuf":
            x[:, [i]] = narrow(values.astype(np.float64)[:, None], [name], where, notes)
        else:
            known: dict[str, int] = {}
            x[:, i] = [np.nan if is_missing(value) else code(str(value), known) for value in values]
            texts[i] = list(known)
    place = rows_in(where)

    def named(name: str | None) -> Array | None:
        if name is None:
            return None
        return np.array(["" if is_missing(value) else str(value) for value in arrays[name]], dtype=str)

    y = joined_columns([as_labels(arrays[label], place) for label in columns.labels], columns.labels, place)
    return Frame(x, texts, y, named(columns.client), named(columns.group), place)


def as_column(values: Any, where: str) -> Array:
    """(n,) numbers, or objects: text, with None or NaN for missing values."""
    try:
        made = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    except ValueError:  # lists of different lengths
        made = np.empty(0)[None]
    if made.ndim != 1:
        raise CoterieError(f"{where}: expected one value per row, got shape {made.shape}")
    if made.dtype.kind in "biuf":
        return made
    made = made.astype(object)
    gone = np.array([is_missing(value) for value in made], bool)
    if all(isinstance(value, (bool, int, float, np.number)) for value in made[~gone]):
        return np.array([np.nan if lost else float(value) for value, lost in zip(made, gone, strict=True)], np.float64)
    for row, value in enumerate(made):
        if not gone[row] and not isinstance(value, (str, bool, int, float, np.number)):
            raise CoterieError(f"{where}, row {row}: expected a number or text, got {type(value).__name__}")
    return made


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NA or NaT, which equal nothing or have no truth value."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except TypeError:
        return True
