"""Arrays of samples in the form that models take: types, ranges, columns in order, several inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.data import Column, Transform, is_pixels
from coterie.core.errors import CoterieError
from coterie.core.packing import pack
from coterie.core.task import Task
from coterie.data.user.arrays import load_npz
from coterie.data.user.reading import Notes
from coterie.data.user.several_inputs import named_inputs

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
        where = f"{path}: {name}.{one.name}"
        array = filled_up(given[one.name], one.shape, None if run.label_shape else one.padding)
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
    if not run.label_shape:
        array = filled_up(array, run.shape, run.transform.padding)
    if array.shape[1:] != run.shape or array.ndim != len(run.shape) + 1:
        raise CoterieError(f"{path}: {name} has the shape {array.shape}; expected (samples, {words(run.shape, ', ')})")
    made = as_trained(str(path), array, run.shape, run.dtype, run.transform.columns)
    check_codes(run.transform.columns, path, made)
    return made


def filled_up(array: NDArray[Any], shape: tuple[int, ...], padding: float | None) -> NDArray[Any]:
    """Sequences (N, t, ...) -> (N, T, ...), padded at the end as in training. shape: (T, ...) of one sample."""
    if padding is None or array.ndim != len(shape) + 1 or array.shape[1] >= shape[0]:
        return array
    return np.pad(
        array, ((0, 0), (0, shape[0] - array.shape[1]), *((0, 0) for _ in shape[1:])), constant_values=padding
    )


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


def words(shape: tuple[int, ...], between: str = " x ") -> str:
    return between.join(map(str, shape))


def listed(columns: Sequence[Column]) -> str:
    return ", ".join(column.name for column in columns[:SHOWN]) + (", ..." if len(columns) > SHOWN else "")
