"""Arrow tables and Parquet files. Each distinct text is stored once, since many rows may share a long text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.user.bounds import Unusable, check_width, decoded_size
from coterie.data.user.frames import Columns, Frame, code, narrow
from coterie.data.user.reading import OUT_OF_RANGE, Array, Notes, as_text, joined_columns, rows_in


def parquet_names(path: Path) -> list[str]:
    names = [str(name) for name in _parquet(path).schema_arrow.names]
    check_width(len(names))
    return names


def read_parquet(path: Path, columns: Columns, notes: Notes) -> Frame:
    file = _parquet(path)
    notes.need(decoded_size(file.metadata), path)
    try:
        table = file.read()
    except Exception as error:  # a damaged file can raise anything
        raise Unusable(f"damaged ({error})") from None
    return frame_of(table, columns, notes, str(path))


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise CoterieError("reading Parquet needs pyarrow: pip install 'coterie[parquet]'") from None
    try:
        texts = [field.name for field in parquet.read_schema(path) if is_text(field.type)]
        return parquet.ParquetFile(path, read_dictionary=texts)
    except Exception as error:
        raise Unusable(f"not a valid Parquet file ({error})") from None


def frame_of(table: Any, columns: Columns, notes: Notes, where: str) -> Frame:
    """Convert an Arrow table. where: file or folder, for error messages."""
    texts: dict[int, list[str]] = {}
    x = np.empty((len(table), len(columns.features)), np.float32)
    for i, name in enumerate(columns.features):
        x[:, i] = _feature(table.column(name), i, name, where, notes, texts)

    def named(name: str | None) -> Array | None:
        return None if name is None else spread(*distinct(table.column(name), where), notes, where)

    y = joined_columns(
        [arrow_labels(table.column(label), notes, where) for label in columns.labels], columns.labels, rows_in(where)
    )
    return Frame(x, texts, y, named(columns.client), named(columns.group), rows_in(where))


def _feature(column: Any, at: int, name: str, where: str, notes: Notes, texts: dict[int, list[str]]) -> Array:
    import pyarrow.types as types

    kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        values = column.cast("float64") if not types.is_float16(kind) else column
        numbers = np.asarray(values.to_numpy(), np.float64)[:, None]
        return narrow(numbers, [name], where, notes)[:, 0]
    if types.is_null(kind):
        return np.full(len(column), np.nan, np.float32)
    if is_text(kind) or types.is_dictionary(kind):
        values, rows = distinct(column, where)
        known: dict[str, int] = {}
        codes = np.array([np.nan if value is None else code(as_str(value), known) for value in values], np.float32)
        texts[at] = list(known)
        return codes[rows]
    first = next((value.as_py() for value in column.slice(0, 100) if value.is_valid), None)
    notes.wrong(
        "column of a type that is neither numbers nor text; leave it out with --drop-column",
        f"{where}, column '{name}' of type {kind}, such as {str(first)[:30]!r}",
    )
    return np.zeros(len(column), np.float32)


def as_str(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def arrow_labels(column: Any, notes: Notes, where: str) -> Array:
    values, at = distinct(column, where)
    if any(isinstance(value, str) for value in values):
        return spread(values, at, notes, where)
    try:
        if all(isinstance(value, int) for value in values[:-1]) and (not len(at) or at.max() < len(values) - 1):
            return np.array([*map(int, values[:-1]), 0], np.int64)[at]
        return np.array([np.nan if v is None else float(v) for v in values], np.float64)[at]
    except (TypeError, ValueError, OverflowError):
        notes.wrong(OUT_OF_RANGE, f"{where}: labels of type {column.type}")
        return np.full(len(column), np.nan)


def is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind))


def distinct(column: Any, where: str) -> tuple[list[Any], Array]:
    """The distinct values of an Arrow column, None last, and (n,) the index of each row's value."""
    import pyarrow as arrow

    try:
        encoded = column if arrow.types.is_dictionary(column.type) else column.dictionary_encode()
        chunk = encoded.unify_dictionaries().combine_chunks()
        chunk = chunk if isinstance(chunk, arrow.Array) else arrow.concat_arrays(chunk.chunks)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, ValueError):
        raise CoterieError(f"{where}: a column of type '{column.type}' cannot hold labels or client names") from None
    values = [*chunk.dictionary.to_pylist(), None]
    return values, np.asarray(chunk.indices.cast("int64").fill_null(len(values) - 1))


def spread(values: Sequence[Any], at: Array, notes: Notes, where: str) -> Array:
    """(n,) names; "" for None."""
    names = as_text(["" if value is None else str(value) for value in values], notes, Path(where))
    notes.need(names.dtype.itemsize * len(at), Path(where))
    return names[at]
