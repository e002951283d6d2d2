"""Tables: CSV and Parquet, one file for each client, or one for all with a column for the client's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coterie.core.errors import CoterieError, some_of, unknown
from coterie.core.names import separated
from coterie.data.user.arrow_columns import parquet_names, read_parquet
from coterie.data.user.bounds import Unusable
from coterie.data.user.csv_files import csv_names, read_csv
from coterie.data.user.frames import Columns, Frame, unified
from coterie.data.user.reading import (
    CLIENTS,
    LABELS,
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
)

KINDS = (".csv", ".parquet")


class File(NamedTuple):
    path: Path
    split: str | None
    frame: Frame


def table_files(folder: Path) -> list[tuple[Path, str | None]]:
    """The tables in a folder, and the split of each: train/*.csv and test/*.csv, or *.csv for both."""
    split: list[tuple[Path, str | None]] = [
        (path, name) for name in ("train", "test") for path in _tables(folder / name)
    ]
    return split or [(path, None) for path in _tables(folder)]


def _tables(folder: Path) -> list[Path]:
    return [p for p in entries(folder) if is_table(p) and p.is_file()] if folder.is_dir() else []


def is_table(path: Path) -> bool:
    return path.suffix.lower() in KINDS


def is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def read_tables(
    files: Sequence[tuple[Path, str | None]], reading: Reading, notes: Notes, shared: bool = False
) -> Found:
    """Read tables. A client is named by its file or by the client column, which a shared file must have."""
    columns: Columns | None = None
    read: list[File] = []
    for path, split in files:
        notes.need(path.stat().st_size, path)
        try:
            names = csv_names(path) if is_csv(path) else parquet_names(path)
            columns = columns or choose(names, reading, shared, path)
            same_columns(columns, names, reading.dropped)
            read.append(File(path, split, (read_csv if is_csv(path) else read_parquet)(path, columns, notes)))
        except Unusable as error:
            notes.wrong(UNREADABLE, f"{path}: {error}")
    kind = "CSV" if is_csv(files[0][0]) else "Parquet"
    if columns is None:
        return Found(f"{kind} files", [])
    read = same_types(read, columns, notes)
    features = unified([file.frame for file in read], columns.features, notes)
    parts = [part for file in read for part in divided(file)]
    how = f"{kind}, clients in column '{columns.client}'" if columns.client else f"{kind} files"
    return Found(how, sorted(parts, key=lambda part: in_order(part.client)), None, columns.labels, features)


def choose(names: Sequence[str], reading: Reading, shared: bool, path: Path | str) -> Columns:
    """Assign roles to the columns."""
    for name in reading.dropped:
        if name not in names:
            raise CoterieError(f"{path}: {unknown('column to drop', name, names)}")
    labels = label_columns(names, reading.label_column, path)
    group = client = None
    others = [name for name in names if name not in labels]
    if reading.group_column is not None:
        group = find_column(others, reading.group_column, (), "group", path)
    if reading.client_column or shared:
        client = find_column(others, reading.client_column, CLIENTS, "client", path)
    features = tuple(name for name in names if name not in (*labels, client, group, *reading.dropped))
    if not features:
        raise CoterieError(f"{path}: no columns besides the label")
    return Columns(labels, client, features, group)


def label_columns(names: Sequence[str], named: str | None, path: Path | str) -> tuple[str, ...]:
    """The label columns: one, or several separated by commas. A name may contain commas."""
    if named is None or named in names or "," not in named:
        return (find_column(names, named, LABELS, "label", path),)
    several = separated(named)
    return tuple(find_column(names, name, (), "label", path) for name in several)


def same_columns(columns: Columns, names: Sequence[str], dropped: Sequence[str]) -> None:
    wanted = {name for name in (*columns.labels, columns.client, columns.group, *columns.features) if name is not None}
    lacks, more = wanted - set(names), set(names) - wanted - set(dropped)
    if lacks or more:
        found = (("missing", lacks), ("unexpected", more))
        differences = "; ".join(f"{word}: {some_of(sorted(which), 10)}" for word, which in found if which)
        raise Unusable(f"columns differ from those of the first table ({differences})")


def same_types(files: list[File], columns: Columns, notes: Notes) -> list[File]:
    """Read a column with text in one file as text in all of them."""
    text = {column for file in files for column in file.frame.texts}
    made = []
    for path, split, frame in files:
        numeric = {column for column in text - set(frame.texts) if not np.isnan(frame.x[:, column]).all()}
        for column in text - set(frame.texts) - numeric:
            frame.texts[column] = []
        if numeric and is_csv(path):
            frame = read_csv(path, columns, Notes(room=notes.room), text)  # its problems are already reported
        elif numeric:
            name = columns.features[min(numeric)]
            notes.wrong(UNREADABLE, f"{path}: column '{name}' holds numbers here and text in other files")
            continue
        made.append(File(path, split, frame))
    return made


def divided(file: File) -> list[Part]:
    frame = file.frame
    assert frame.y is not None
    if frame.owners is not None:
        return by_client(frame.x, frame.y, frame.owners, file.split, frame.place, frame.group)
    client = readable(file.path.stem)
    return [Part(client, file.split, frame.x, frame.y, frame.place, own_groups(frame.group, client))]


def own_groups(group: Array | None, client: str) -> Array | None:
    """Prefix group names with the client: the same name on another client is another group."""
    if group is None:
        return None
    return np.where(group == "", "", np.char.add(f"{client}/", group))
