"""Hugging Face datasets that `save_to_disk` left: Arrow files, read with pyarrow; `datasets` is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.own.images import decoded, pillow, same
from coterie.data.own.reading import (
    CLIENTS,
    LABELS,
    OTHER_SHAPE,
    UNREADABLE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    by_client,
    find_column,
    upright,
)
from coterie.data.own.tables import Columns, rows_of_table

SPLITS = ("train", "test")


def is_hugging_face(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def read_hugging_face(folder: Path, reading: Reading, notes: Notes) -> Found:
    """A Dataset, or a DatasetDict with train and test; one column says the client."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json").get("splits", [])
        named = [split for split in SPLITS if split in splits]
        if "train" not in named:
            raise CoterieError(f"{folder}: its splits are {', '.join(map(str, splits)) or 'none'}; train is needed")
        places = [(folder / split, split if len(named) == 2 else None) for split in named]
    else:
        places = [(folder, None)]
    parts: list[Part] = []
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    for place, split in places:
        features = read_json(place / "dataset_info.json").get("features") or {}
        table = read_arrow(place, notes)
        names = [str(name) for name in table.column_names]
        label = find_column(names, reading.label_column or class_column(features), LABELS, "label", place)
        others = [name for name in names if name != label]
        client = find_column(others, reading.client_column, CLIENTS, "client", place)
        classes = class_names(features, label) or classes
        more, columns = read_rows(table, label, client, split, place, notes)
        parts += more
    return Found("a Hugging Face dataset", parts, classes, columns)


def read_rows(
    table: Any, label: str, client: str, split: str | None, folder: Path, notes: Notes
) -> tuple[list[Part], tuple[str, ...]]:
    """One column of images or lists is the sample; else all other columns are, as numbers."""
    names = tuple(str(name) for name in table.column_names if name not in (label, client))
    whole = [name for name in names if is_nested(table.column(name).type)]
    if len(whole) > 1 or (whole and len(names) > 1) or not names:
        raise CoterieError(
            f"{folder}: beside label and client there must be one column of images or lists, or columns of numbers; "
            f"there are: {', '.join(names) or 'none'}. Remove the others (dataset.remove_columns)"
        )
    rows = rows_of_table(table, Columns(label, client, () if whole else names), notes, str(folder))
    assert rows.owners is not None

    def place(i: int) -> str:
        return f"{folder}, row {kept[i]}"

    kept = np.arange(len(table))
    x = rows.x
    if whole:
        kept, x = samples(table.column(whole[0]), str(folder), notes)
    return by_client(x, rows.y[kept], rows.owners[kept], split, place), () if whole else names


def is_nested(kind: Any) -> bool:
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)
    return bool(
        types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    )


def samples(column: Any, where: str, notes: Notes) -> tuple[Array, Array]:
    """Rows that could be read, and their samples (n, ...)."""
    import pyarrow.types as types

    kind = getattr(column.type, "storage_type", column.type)
    if not types.is_struct(kind):
        return lists(column, where, notes)
    kept: list[int] = []
    made: list[Array] = []
    with pillow() as decode:
        for i, value in enumerate(column):
            content = (value.as_py() or {}).get("bytes")
            if not content:
                notes.wrong(UNREADABLE, f"{where}, row {i}: the image is not in the dataset")
                continue
            image = decoded(content, f"{where}, row {i}", decode, notes)
            if image is not None and same(image, made[0] if made else None, f"{where}, row {i}", notes):
                kept.append(i)
                made.append(image)
    return np.array(kept, np.int64), np.stack(made) if made else np.empty((0, 1), np.uint8)


def lists(column: Any, where: str, notes: Notes) -> tuple[Array, Array]:
    """Lists of numbers, nested or not, that are all equally long."""
    import pyarrow.compute as compute

    values = column.combine_chunks()
    values = getattr(values, "storage", values)
    count = len(values)
    shape: list[int] = []
    while is_nested(values.type):
        lengths = np.asarray(compute.list_value_length(values).fill_null(-1).to_numpy(zero_copy_only=False))
        other = np.flatnonzero(lengths != lengths[:1])
        if len(other) or (len(lengths) and lengths[0] < 0):
            row = int(other[0]) // int(np.prod(shape, dtype=np.int64) or 1) if len(other) else 0
            notes.wrong(OTHER_SHAPE, f"{where}, row {row}: lists of unlike length, or none")
            return np.empty(0, np.int64), np.empty((0, 1), np.float32)
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
    try:
        flat = np.asarray(values.to_numpy(zero_copy_only=False))
        return np.arange(count), upright(flat.reshape(count, *shape))
    except (ValueError, TypeError) as error:
        raise CoterieError(f"{where}: the lists hold something else than numbers ({error})") from None


def class_column(features: dict[str, Any]) -> str | None:
    """The one column whose values are classes."""
    found = [name for name in features if class_names(features, name)]
    return found[0] if len(found) == 1 else None


def class_names(features: dict[str, Any], column: str) -> tuple[str, ...] | None:
    about = features.get(column)
    if isinstance(about, dict) and about.get("_type") == "ClassLabel" and isinstance(about.get("names"), list):
        return tuple(str(name) for name in about["names"])
    return None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CoterieError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise CoterieError(f"{path}: a dictionary is expected in it")
    return content


def read_arrow(folder: Path, notes: Notes) -> Any:
    try:
        import pyarrow as arrow
    except ImportError:
        raise CoterieError("reading Hugging Face datasets needs pyarrow: pip install 'coterie[datasets]'") from None
    listed = read_json(folder / "state.json").get("_data_files")
    try:
        files = [folder / Path(str(entry["filename"])).name for entry in listed or []]
        notes.need(sum(path.stat().st_size for path in files), folder)
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all() for path in files]
        table = arrow.concat_tables(tables)
        table.validate(full=True)  # a damaged offset would be followed out of the file
        return table
    except Exception as error:  # a damaged file can fail in any way
        raise CoterieError(f"{folder}: not a dataset that save_to_disk left, or a damaged one ({error})") from None
