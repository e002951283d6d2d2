"""Read samples for prediction: images, tables matched by column name, or arrays of an .npz file."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.data import Column, Transform, is_pixels
from coterie.core.errors import CoterieError
from coterie.core.packing import pack
from coterie.core.task import Task
from coterie.data.pixels import fitted
from coterie.data.user import read_table_by
from coterie.data.user.arrays import load_npz
from coterie.data.user.reading import LABELS, Notes
from coterie.data.user.several_inputs import named_inputs
from coterie.data.user.tables import KINDS

log = logging.getLogger(__name__)

SHOWN = 8  # columns in a message


class SampleForm(Protocol):
    """The form of the samples that models take: of those of a run, or of a federation."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # of one raw sample
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def transform(self) -> Transform: ...
    @property
    def label_shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> int: ...  # 0: a sample does not have one class
    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def task(self) -> Task: ...


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
    label_column: str | None = None,
    dropped: Sequence[str] = (),
) -> Samples:
    """All samples in these files, in the form that the run's models take. dropped: unused columns."""
    parts = [read_file(run, Path(path), resize, label_column, dropped) for path in paths]
    if not parts:
        raise CoterieError("no samples were given")
    x = torch.cat([part.x for part in parts])
    return Samples(x, *([v for part in parts for v in part[column]] for column in (1, 2)))


def read_file(run: SampleForm, path: Path, resize: bool, label_column: str | None, dropped: Sequence[str]) -> Samples:
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
        x, labels, _ = read_table(run, path, label_column, dropped)
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
    label_column: str | None = None,
    dropped: Sequence[str] = (),
    group_column: str | None = None,
) -> Rows:
    """Read a CSV or Parquet file by column name, or by position if the run or the file has no names."""
    columns = run.transform.columns
    if not columns:
        if path.suffix.lower() != ".csv":
            raise CoterieError(f"{path}: the models of this run take arrays of {words(run.shape)}; give .npz or .csv")
        if group_column is not None:
            raise CoterieError(f"{path}: --group-column is for tables with named columns")
        return read_rows(run, path, label_column)
    names = {"label_column": label_column, "group_column": group_column}
    labels = () if run.classes else run.class_names
    table = read_table_by(columns, path, ignored=dropped, labels=labels, **names)
    if table.by_position:
        log.warning("%s has no header; its columns were taken by position: %s", path, listed(columns))
    return Rows(table.x.to(run.dtype), table.labels, table.groups)


def listed(columns: Sequence[Column]) -> str:
    return ", ".join(column.name for column in columns[:SHOWN]) + (", ..." if len(columns) > SHOWN else "")


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file."""
    if not path.is_file():
        raise CoterieError(f"{path}: no such file")
    return load_npz(path, Notes())


def refuse_one_input(run: SampleForm, path: Path) -> None:
    """Raise an error for a file that cannot hold the several inputs of this run's samples."""
    if run.transform.inputs and path.suffix.lower() != ".npz":
        needed = ", ".join(f"x.{one.name}" for one in run.transform.inputs)
        raise CoterieError(f"{path}: the samples of this run have several inputs; give an .npz file with {needed}")


def samples_of(run: SampleForm, path: Path, name: str, arrays: dict[str, NDArray[Any]]) -> Tensor:
    """(N, *shape) from an array of this name, or from one array name.INPUT for each of several inputs, packed."""
    inputs, given = run.transform.inputs, named_inputs(arrays, name)
    if not inputs:
        if name not in arrays:
            raise CoterieError(f"{path}: no array '{name}'; it has: {', '.join(arrays) or 'none'}")
        return as_samples(run, path, name, arrays[name], arrays.get("columns"))
    for key in (*(one.name for one in inputs), *given):
        if (key in given) != any(key == one.name for one in inputs):
            word = "no" if key not in given else "an unknown"
            raise CoterieError(f"{path}: {word} array '{name}.{key}'; expected: {', '.join(map(str, inputs))}")
    made = {}
    for one in inputs:
        array, where = given[one.name], f"{path}: {name}.{one.name}"
        if array.shape[1:] != one.shape or array.ndim != len(one.shape) + 1:
            raise CoterieError(f"{where} has the shape {array.shape}; expected {('samples', *one.shape)}")
        made[one.name] = as_trained(where, array, one.shape, one.type)
        if made[one.name].dtype != one.type:
            raise CoterieError(f"{where} has fractions; as in training, images must be bytes from 0 to 255")
    if len({len(values) for values in made.values()}) > 1:
        found = ", ".join(f"{key} {len(values)}" for key, values in made.items())
        raise CoterieError(f"{path}: inputs of different lengths: {found}")
    return pack(inputs, made)


def as_samples(
    run: SampleForm, path: Path, name: str, array: NDArray[Any], columns: NDArray[Any] | None = None
) -> Tensor:
    """(N, *shape), checked against the training data. columns: names of the array's columns."""
    if run.shape[:1] == (1,) and array.shape[1:] == run.shape[1:]:
        array = array[:, None]  # grey images (N, H, W)
    known = [column.name for column in run.transform.columns]
    if known and columns is not None and array.ndim == 2:
        array = array[:, in_order(path, known, columns.astype(str).tolist())]
    elif known:
        log.warning(
            "%s has no array 'columns'; %s was taken by position: %s", path, name, listed(run.transform.columns)
        )
    if array.shape[1:] != run.shape or array.ndim != len(run.shape) + 1:
        raise CoterieError(f"{path}: {name} has the shape {array.shape}; expected (samples, {words(run.shape, ', ')})")
    made = as_trained(str(path), array, run.shape, run.dtype, run.transform.columns)
    check_codes(run.transform.columns, path, made)
    return made


def check_codes(columns: Sequence[Column], path: Path, x: Tensor) -> None:
    """Check categories in an array, which are coded by their position among those of training."""
    for at, column in enumerate(columns):
        codes = x[:, at][~x[:, at].isnan()] if column.categories else x[:0, at]
        wrong = codes[(codes != codes.round()) | (codes < 0) | (codes >= len(column.categories))]
        if len(wrong):
            coding = ", ".join(f"{code} for '{name}'" for code, name in enumerate(column.categories[:SHOWN]))
            raise CoterieError(f"{path}: column '{column.name}' holds {wrong[0]:g}; its categories are coded {coding}")


def in_order(path: Path, known: Sequence[str], given: Sequence[str]) -> list[int]:
    """The position of each known column among the given ones."""
    for column in (*known, *given):
        if (column in known) != (column in given):
            word = "missing in" if column in known else "unknown in"
            raise CoterieError(f"Column '{column}' is {word} {path} (expected: {', '.join(known)})")
    return [list(given).index(column) for column in known]


def as_trained(
    path: str, array: NDArray[Any], shape: tuple[int, ...], dtype: torch.dtype, columns: Sequence[Column] = ()
) -> Tensor:
    """Convert to the type and range of training. Images may also be floats in 0..1."""
    if array.dtype.kind not in "iufb":
        raise CoterieError(f"{path}: has {array.dtype}, not numbers")
    filled = np.array([column.fill is not None for column in columns])  # NaN marks a missing value
    fine = (
        np.isfinite(array) | (np.isnan(array) & filled if filled.any() else False) if array.dtype.kind == "f" else True
    )
    if not np.all(fine):
        raise CoterieError(f"{path}: has values that are not finite")
    if not is_pixels(shape, dtype):
        if not dtype.is_floating_point and not whole_numbers(array, dtype):
            kind = str(dtype).removeprefix("torch.")
            raise CoterieError(f"{path}: the models of this run take integers of type {kind}, got {array.dtype}")
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    low, high = (array.min(), array.max()) if array.size else (0, 0)
    if array.dtype.kind == "f" and not (array == np.round(array)).all():
        if not 0 <= low <= high <= 1:
            raise CoterieError(f"{path}: images with fractions must be in 0..1, got {low:g}..{high:g}")
        return torch.from_numpy(np.ascontiguousarray(array, np.float32))
    if array.dtype.kind == "f" and high == 1:
        raise CoterieError(f"{path}: images of 0.0 and 1.0 only: black and white, or bytes? Store bytes from 0 to 255")
    if not 0 <= low <= high <= 255:
        raise CoterieError(f"{path}: images must be in 0..255, got {low:g}..{high:g}")
    return torch.from_numpy(np.ascontiguousarray(array, np.uint8))


def whole_numbers(array: NDArray[Any], dtype: torch.dtype) -> bool:
    """Whether tokens fit the type used in training."""
    kind = torch.iinfo(dtype) if dtype != torch.bool else torch.iinfo(torch.uint8)
    if not array.size:
        return True
    return bool((array == np.round(array)).all() and kind.min <= array.min() and array.max() <= kind.max)


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


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


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


def words(shape: tuple[int, ...], between: str = " x ") -> str:
    return between.join(map(str, shape))
