"""Hugging Face datasets written by `save_to_disk`: Arrow files, read with pyarrow; `datasets` is not needed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.user.arrow_columns import frame_of
from coterie.data.user.bounds import is_compressed, small_text
from coterie.data.user.frames import Frame, unified
from coterie.data.user.images import decoded, pillow, same
from coterie.data.user.reading import (
    OTHER_SHAPE,
    UNREADABLE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    by_client,
)
from coterie.data.user.tables import choose

SPLITS = ("train", "test")


def is_hugging_face(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def read_hugging_face(folder: Path, reading: Reading, notes: Notes) -> Found:
    """Read a Dataset, or a DatasetDict with train and test; one column gives the client."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json").get("splits", [])
        if not isinstance(splits, list):
            raise CoterieError(f"{folder / 'dataset_dict.json'}: 'splits' must be a list of names")
        named = [split for split in SPLITS if split in splits]
        if "train" not in named:
            raise CoterieError(f"{folder}: no split 'train' (found: {', '.join(map(str, splits)) or 'none'})")
        places = [(folder / split, split if len(named) == 2 else None) for split in named]
    else:
        places = [(folder, None)]
    classes: tuple[str, ...] | None = None
    read: list[tuple[Frame, str | None]] = []
    names: tuple[str, ...] = ()
    whole = False
    for place, split in places:
        features = read_json(place / "dataset_info.json").get("features") or {}
        if not isinstance(features, dict):
            raise CoterieError(f"{place / 'dataset_info.json'}: 'features' must be a dictionary of columns")
        table = read_arrow(place, notes)
        label = reading.label_column or class_column(features)
        own = choose([str(n) for n in table.column_names], replace(reading, label_column=label), True, place)
        if read and own.features != names:
            raise CoterieError(f"{place}: columns differ from those in {places[0][0]}: {', '.join(own.features)}")
        names, classes = own.features, class_names(features, own.labels[0]) or classes
        whole = sample_column(table, names, place)
        frame = frame_of(table, own._replace(features=() if whole else names), notes, str(place))
        read.append(
            (with_samples(frame, table.column(names[0]), place, notes, reading.resize) if whole else frame, split)
        )
    columns = () if whole else unified([frame for frame, _ in read], names, notes)
    parts = [part for frame, split in read for part in divided(frame, split)]
    return Found("a Hugging Face dataset", parts, classes, own.labels, columns)


def sample_column(table: Any, names: tuple[str, ...], folder: Path) -> bool:
    """Whether the samples are one column of images or lists, rather than a table."""
    nested = [name for name in names if is_nested(table.column(name).type)]
    if len(nested) > 1 or (nested and len(names) > 1):
        raise CoterieError(
            f"{folder}: besides label and client, one column of images or lists is needed, or columns of numbers and "
            f"text; found: {', '.join(names)}. Leave the others out with --drop-column"
        )
    return bool(nested)


def with_samples(frame: Frame, column: Any, folder: Path, notes: Notes, side: int | None) -> Frame:
    """The rows whose sample could be read."""
    kept, x = samples(column, str(folder), notes, side)
    y, owners, group = (None if values is None else values[kept] for values in (frame.y, frame.owners, frame.group))
    return Frame(x, {}, y, owners, group, lambda i: f"{folder}, row {kept[i]}")


def divided(frame: Frame, split: str | None) -> list[Part]:
    assert frame.y is not None
    assert frame.owners is not None
    return by_client(frame.x, frame.y, frame.owners, split, frame.place, frame.group)


def is_nested(kind: Any) -> bool:
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)
    return bool(
        types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    )


def samples(column: Any, where: str, notes: Notes, side: int | None) -> tuple[Array, Array]:
    """The rows that could be read, and their samples (n, ...). side: pixels to which images are resized."""
    import pyarrow.types as types

    kind = getattr(column.type, "storage_type", column.type)
    if not types.is_struct(kind):
        if side is not None:
            raise CoterieError(f"{where}: --resize is for images, not for lists of numbers")
        return lists(column, where, notes)
    kept: list[int] = []
    made: list[Array] = []
    with pillow(side) as decode:
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
    """Lists of numbers, nested or not, all of the same length."""
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
            notes.wrong(OTHER_SHAPE, f"{where}, row {row}: missing list, or lists of different lengths")
            return np.empty(0, np.int64), np.empty((0, 1), np.float32)
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
        notes.need(8 * len(values), Path(where))
    try:
        flat = np.asarray(values.to_numpy(zero_copy_only=False))
        return np.arange(count), flat.reshape(count, *shape)
    except (ValueError, TypeError) as error:
        raise CoterieError(f"{where}: the lists must hold numbers ({error})") from None


def class_column(features: dict[str, Any]) -> str | None:
    """The only column of class labels, if there is one."""
    found = [name for name in features if class_names(features, name)]
    return found[0] if len(found) == 1 else None


def class_names(features: dict[str, Any], column: str) -> tuple[str, ...] | None:
    about = features.get(column)
    if isinstance(about, dict) and about.get("_type") == "ClassLabel" and isinstance(about.get("names"), list):
        return tuple(str(name) for name in about["names"])
    return None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(small_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CoterieError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise CoterieError(f"{path}: expected a JSON object")
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
        for path in files:
            if any(is_compressed(message.metadata.to_pybytes()) for message in messages(path)):
                raise CoterieError(f"{path}: holds compressed buffers; save the dataset without compression")
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all() for path in files]
        table = arrow.concat_tables(tables)
        notes.need(8 * len(table) * len(table.column_names), folder)  # columns of nulls take no space in the file
        table.validate(full=True)  # a damaged offset could point outside the file
        return table
    except CoterieError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise CoterieError(f"{folder}: not a valid dataset of save_to_disk ({error})") from None


def messages(path: Path) -> Iterator[Any]:
    """Yield the messages of an Arrow stream without decoding them."""
    import pyarrow as arrow

    reader = arrow.ipc.MessageReader.open_stream(arrow.memory_map(str(path)))
    with contextlib.suppress(StopIteration):
        while True:
            yield reader.read_next_message()
