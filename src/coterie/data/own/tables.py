"""Tables: CSV and Parquet, one file for each client, or one for all with a column that says whose a row is."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.own.reading import (
    CLIENTS,
    LABELS,
    MISSING,
    OUT_OF_RANGE,
    TEXT,
    UNREADABLE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    by_client,
    entries,
    find_column,
    in_order,
    readable,
    whole_labels,
)

KINDS = (".csv", ".parquet")
NOTHING = {"", "na", "nan", "null", "none", "?"}  # how people write that a value is missing
CELLS = 1_000_000  # of a CSV file that are held as text at a time


class Unusable(Exception):
    """A file that cannot be read; the others still can."""


class Columns(NamedTuple):
    """Which columns are what; the same in every file."""

    label: str
    client: str | None
    features: tuple[str, ...]


class Rows(NamedTuple):
    x: Array  # (n, F) float32
    y: Array  # (n,)
    owners: Array | None  # (n,) names
    lines: Array  # (n,) where in the file


def table_files(folder: Path) -> list[tuple[Path, str | None]]:
    """The tables in a folder, and the split of each: train/*.csv and test/*.csv, or *.csv for both."""
    split: list[tuple[Path, str | None]] = [
        (path, name) for name in ("train", "test") for path in _tables(folder / name)
    ]
    return split or [(path, None) for path in _tables(folder)]


def _tables(folder: Path) -> list[Path]:
    return [p for p in entries(folder) if p.suffix.lower() in KINDS and p.is_file()] if folder.is_dir() else []


def read_tables(
    files: Sequence[tuple[Path, str | None]], reading: Reading, notes: Notes, shared: bool = False
) -> Found:
    """client.csv, ...: a client's name is that of its file, unless a column says it; of a shared file one must."""
    columns: Columns | None = None
    parts: list[Part] = []
    for path, split in files:
        notes.need(path.stat().st_size, path)
        text = path.suffix.lower() == ".csv"
        try:
            names = csv_names(path) if text else parquet_names(path)
            columns = columns or choose(names, reading, shared, path)
            same_columns(columns, names)
            parts += divided(path, split, (read_csv if text else read_parquet)(path, columns, notes))
        except Unusable as error:
            notes.wrong(UNREADABLE, f"{path}: {error}")
    kind = "CSV" if files[0][0].suffix.lower() == ".csv" else "Parquet"
    how = f"{kind} files" if not columns or not columns.client else f"{kind}, clients in column '{columns.client}'"
    features = columns.features if columns else ()
    return Found(how, sorted(parts, key=lambda part: in_order(part.client)), columns=features)


def choose(names: Sequence[str], reading: Reading, shared: bool, path: Path) -> Columns:
    label = find_column(names, reading.label_column, LABELS, "label", path)
    client = None
    if reading.client_column is not None or shared:
        others = [name for name in names if name != label]
        client = find_column(others, reading.client_column, CLIENTS, "client", path)
    features = tuple(name for name in names if name not in (label, client))
    if not features:
        raise CoterieError(f"{path}: there are no columns beside the label")
    return Columns(label, client, features)


def same_columns(columns: Columns, names: Sequence[str]) -> None:
    wanted = {columns.label, *columns.features, *([columns.client] if columns.client else [])}
    lacks, more = wanted - set(names), set(names) - wanted
    if lacks or more:
        told = [f"{word} {', '.join(sorted(which))}" for word, which in (("lacks", lacks), ("has", more)) if which]
        raise Unusable(f"other columns than the files before it: it {' and '.join(told)}")


def divided(path: Path, split: str | None, rows: Rows) -> list[Part]:
    def place(i: int) -> str:
        return f"{path}, line {rows.lines[i]}" if path.suffix.lower() == ".csv" else f"{path}, row {rows.lines[i]}"

    if rows.owners is not None:
        return by_client(rows.x, rows.y, rows.owners, split, place)
    return [Part(readable(path.stem), split, rows.x, rows.y, place)]


# CSV


def csv_names(path: Path) -> list[str]:
    return next(csv_lines(path))[1]


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields, first of the column names, then of every row that is not blank."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(2**20)
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
            names = [name.strip() for name in next(reader, [])]
            check_names(names)
            yield 1, names
            for fields in reader:
                if fields:
                    yield reader.line_num, fields
    except UnicodeDecodeError:
        raise Unusable(f"line {first_bad_line(path)} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise Unusable(f"cannot be opened ({error.strerror})") from None
    except csv.Error as error:
        raise Unusable(f"not a CSV file ({error})") from None


def check_names(names: list[str]) -> None:
    if not any(names):
        raise Unusable("the first line must name the columns, and it is empty")
    if all(name and number(name) is not None for name in names):
        raise Unusable("the first line must name the columns, and it holds numbers")
    if len(set(names)) < len(names):
        raise Unusable(f"two columns have the same name: {max(names, key=names.count)!r}")


def first_bad_line(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(2**24), b""), 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def read_csv(path: Path, columns: Columns, notes: Notes) -> Rows:
    lines = csv_lines(path)
    names = next(lines)[1]
    at = [names.index(name) for name in columns.features]
    label, client = names.index(columns.label), columns.client and names.index(columns.client)
    pieces = [Rows(np.empty((0, len(at)), np.float32), np.empty(0, np.int64), None, np.empty(0, np.int64))]
    texts: list[str] = []
    owners: list[str] = []
    while block := list(itertools.islice(lines, max(1, CELLS // len(names)))):
        block = [row for row in block if right_length(path, row, names, notes)]
        kept, x = numbers(path, block, at, names, notes)
        texts += [fields[label].strip() for _, fields in kept]
        if client is not None:
            owners += [fields[int(client)].strip() for _, fields in kept]
        pieces.append(Rows(x, np.empty(0), None, np.array([line for line, _ in kept], np.int64)))
    x, lines_at = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 3))
    y = labels_of_texts(texts, lambda i: f"{path}, line {lines_at[i]}", notes)
    return Rows(x, y, np.array(owners, dtype=str) if client is not None else None, lines_at)


def right_length(path: Path, row: tuple[int, list[str]], names: list[str], notes: Notes) -> bool:
    line, fields = row
    if len(fields) != len(names):
        notes.wrong("row of another length", f"{path}, line {line}: {len(fields)} values for {len(names)} columns")
    return len(fields) == len(names)


def numbers(
    path: Path, rows: list[tuple[int, list[str]]], at: list[int], names: list[str], notes: Notes
) -> tuple[list[tuple[int, list[str]]], Array]:
    """The rows without those that hold text, and their values (n, F); NaN where a value is missing."""
    try:
        values = np.array([[fields[i] for i in at] for _, fields in rows], np.float64).reshape(-1, len(at))
        return rows, narrow(values)
    except ValueError:
        pass
    kept, made = [], []
    for line, fields in rows:
        own = [number(fields[i]) for i in at]
        if None in own:
            name, text = names[at[own.index(None)]], fields[at[own.index(None)]]
            notes.wrong(TEXT, f"{path}, line {line}, column '{name}': {text[:30]!r}")
        else:
            kept.append((line, fields))
            made.append(own)
    return kept, narrow(np.array(made, np.float64).reshape(-1, len(at)))


def narrow(values: Array) -> Array:
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is told as such
        return values.astype(np.float32)


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return float("nan") if text.strip().lower() in NOTHING else None


def labels_of_texts(texts: list[str], place: Any, notes: Notes) -> Array:
    """Whole numbers if all are; else names."""
    try:
        return np.array([int(text) for text in texts], np.int64)
    except (ValueError, OverflowError):
        pass
    values = [None if text.lower() in NOTHING else number(text) for text in texts]
    if all(value is not None or text.lower() in NOTHING for value, text in zip(values, texts, strict=True)):
        return whole_labels(np.array([np.nan if v is None else v for v in values], np.float64), notes, place)
    return np.array(["" if text.lower() in NOTHING else text for text in texts], dtype=str)


# Parquet


def parquet_names(path: Path) -> list[str]:
    return [str(name) for name in _parquet(path).schema_arrow.names]


def read_parquet(path: Path, columns: Columns, notes: Notes) -> Rows:
    file = _parquet(path)
    notes.need(8 * file.metadata.num_rows * file.metadata.num_columns, path)
    try:
        table = file.read()
    except Exception as error:  # a damaged file can fail in any way
        raise Unusable(f"damaged ({error})") from None
    return rows_of_table(table, columns, notes, str(path))


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise CoterieError("reading Parquet needs pyarrow: pip install 'coterie[parquet]'") from None
    try:
        return parquet.ParquetFile(path)
    except Exception as error:
        raise Unusable(f"not a Parquet file, or a damaged one ({error})") from None


def rows_of_table(table: Any, columns: Columns, notes: Notes, where: str) -> Rows:
    """From an Arrow table: features as float32, labels as numbers or names."""
    made = [_feature(table.column(name), name, where, notes) for name in columns.features]
    x = np.stack(made, axis=1) if made else np.empty((len(table), 0), np.float32)
    y = arrow_labels(table.column(columns.label), notes, where)
    owners = None
    if columns.client is not None:
        owners = np.array(["" if v is None else str(v) for v in table.column(columns.client).to_pylist()], dtype=str)
    return Rows(x, y, owners, np.arange(len(table)))


def _feature(column: Any, name: str, where: str, notes: Notes) -> Array:
    import pyarrow.types as types

    kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        values = column.cast("float64") if not types.is_float16(kind) else column
        return narrow(np.asarray(values.to_numpy(), np.float64))
    first = next((value for value in column.to_pylist() if value is not None), None)
    notes.wrong(TEXT, f"{where}, row 0, column '{name}' of type {kind}: {str(first)[:30]!r}")
    return np.zeros(len(column), np.float32)


def arrow_labels(column: Any, notes: Notes, where: str) -> Array:
    def place(i: int) -> str:
        return f"{where}, row {i}"

    values = column.to_pylist()
    if any(isinstance(value, str) for value in values):
        return np.array(["" if value is None else str(value) for value in values], dtype=str)
    try:
        if all(isinstance(value, (int, type(None))) for value in values):
            return np.array([MISSING if value is None else int(value) for value in values], np.int64)
        return whole_labels(np.array([np.nan if v is None else float(v) for v in values], np.float64), notes, place)
    except (TypeError, ValueError, OverflowError):
        notes.wrong(OUT_OF_RANGE, f"{where}: labels of type {column.type}")
        return np.full(len(values), MISSING, np.int64)
