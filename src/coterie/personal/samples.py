"""Read samples for prediction: images, tables matched by column name, or arrays of an .npz file."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.data.pixels import fitted
from coterie.data.user import read_table_by
from coterie.data.user.frames import is_number
from coterie.data.user.reading import LABELS
from coterie.data.user.tables import KINDS
from coterie.personal.arrays import (
    SampleForm,
    as_trained,
    listed,
    read_arrays,
    refuse_one_input,
    samples_of,
    words,
)

log = logging.getLogger(__name__)


LabelColumn = tuple[str | None, str | None]  # as the user names it, and that of the run's own table


class Samples(NamedTuple):
    x: Tensor  # (N, ...) raw
    names: list[str]  # file and row of each
    labels: list[str]  # as in the file; "" if there is none


class Rows(NamedTuple):
    """A table in the form that a run's models take."""

    x: Tensor  # (N, ...) raw
    labels: NDArray[Any] | None  # (N, ...) numbers or text, if there are label columns
    groups: NDArray[Any] | None = None  # (N,) names, if a group column was requested


def read_samples(
    run: SampleForm,
    paths: Sequence[str | Path],
    resize: bool = False,
    label: LabelColumn = (None, None),
    dropped: Sequence[str] = (),
) -> Samples:
    """All samples in these files, in the form that the run's models take. dropped: unused columns."""
    parts = [read_file(run, Path(path), resize, label, dropped) for path in paths]
    if not parts:
        raise CoterieError("no samples were given")
    x = torch.cat([part.x for part in parts])
    return Samples(x, *([v for part in parts for v in part[column]] for column in (1, 2)))


def read_file(run: SampleForm, path: Path, resize: bool, label: LabelColumn, dropped: Sequence[str]) -> Samples:
    if not path.is_file():
        raise CoterieError(f"{path}: no such file")
    kind = path.suffix.lower()
    refuse_one_input(run, path)
    if kind not in (*KINDS, ".npz"):
        return Samples(read_image(run, path, resize)[None], [str(path)], [""])
    labels = None
    if kind == ".npz":
        x = samples_of(run, path, "x", read_arrays(path))
    else:
        x, labels, _ = read_table(run, path, label, dropped)
    if not len(x):
        raise CoterieError(f"{path} has no samples")
    texts = [label_text(label) for label in labels] if labels is not None else [""] * len(x)
    return Samples(x, [f"{path}:{row}" for row in range(len(x))], texts)


def label_text(label: Any) -> str:
    """A label as in the file; several separated by commas."""
    numbers = [f"{value:g}" if isinstance(value, float) else str(value) for value in np.atleast_1d(label).tolist()]
    return ", ".join(numbers)


def read_table(
    run: SampleForm,
    path: Path,
    label: LabelColumn = (None, None),
    dropped: Sequence[str] = (),
    group_column: str | None = None,
) -> Rows:
    """Read a CSV or Parquet file by column name, or by position if the run or the file has no names."""
    columns = run.transform.columns
    label_column, usual = label
    if not columns:
        if path.suffix.lower() != ".csv":
            raise CoterieError(f"{path}: the models of this run take arrays of {words(run.shape)}; give .npz or .csv")
        if group_column is not None:
            raise CoterieError(f"{path}: --group-column is for tables with named columns")
        return read_rows(run, path, label_column)
    names = {"label_column": label_column, "group_column": group_column}
    labels = tuple(() if usual is None else (usual,)) if run.classes else run.class_names
    table = read_table_by(columns, path, ignored=dropped, labels=labels, **names)
    if table.by_position:
        log.warning("%s has no header; its columns were taken by position: %s", path, listed(columns))
    return Rows(table.x.to(run.dtype), table.labels, table.groups)


def read_rows(run: SampleForm, path: Path, label_column: str | None = None) -> Rows:
    """Read a CSV file by position, for a run whose columns have no names. A header is optional."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error) as error:
        raise CoterieError(f"{path}: cannot be read ({error})") from None
    labels = None
    if rows and not all(map(is_number, rows[0])):
        header, *rows = rows
        found = [name for name in header if name == label_column or (not label_column and name.lower() in LABELS)]
        if len(found) == 1:
            at = header.index(found[0])
            labels = np.array([row.pop(at).strip() if len(row) == len(header) else "" for row in rows], dtype=str)
        log.warning("%s: the columns of this run have no names; those of the file were taken by position", path)
    if label_column and labels is None:
        raise CoterieError(f"{path}: no column '{label_column}' for the label")
    needed = math.prod(run.shape)
    for number, row in enumerate(rows):
        if len(row) != needed or not all(map(is_number, row)):
            wrong = next((cell for cell in row if not is_number(cell)), None)
            found_there = f"{len(row)} columns" if len(row) != needed else f"'{wrong}'"
            raise CoterieError(f"{path}, sample {number}: {found_there}; expected {needed} numbers")
    array = np.array([[float(cell) for cell in row] for row in rows]).reshape(len(rows), *run.shape)
    return Rows(as_trained(str(path), array, run.shape, run.dtype), labels)


def read_image(run: SampleForm, path: Path, resize: bool) -> Tensor:
    """(C, H, W) pixels, gray or RGB as the models take."""
    modes = {1: "L", 3: "RGB"}
    if len(run.shape) != 3 or run.shape[0] not in modes:
        raise CoterieError(
            f"{path}: the models of this run take samples of shape {words(run.shape)}, not images; give a .csv or .npz"
        )
    try:
        from PIL import Image
    except ImportError:
        raise CoterieError("to read images, install Pillow: pip install 'coterie[images]'") from None
    channels, height, width = run.shape
    try:
        with Image.open(path) as image:
            picture = image.convert(modes[channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CoterieError(f"{path}: cannot be read as an image ({error})") from None
    if picture.size != (width, height):
        if not resize:
            raise CoterieError(
                f"{path}: {picture.width} x {picture.height} pixels; the models of this run take "
                f"{width} x {height}. --resize changes the size"
            )
        picture = fitted(picture, height, width)
    pixels = np.array(picture, np.uint8).reshape(height, width, channels)
    return torch.from_numpy(np.moveaxis(pixels, 2, 0).copy())
