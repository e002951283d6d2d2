"""Samples to predict: image files, rows of a CSV file, or arrays of an .npz file."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.data.partition import DAMAGED, damage
from coterie.personal.run import Run


class Samples(NamedTuple):
    x: Tensor  # (N, ...) raw
    names: list[str]  # of each: its file, and its row in it


def read_samples(run: Run, paths: Sequence[str | Path], resize: bool = False) -> Samples:
    """All that these files hold, as the models of this run take them."""
    parts = [read_file(run, Path(path), resize) for path in paths]
    if not parts:
        raise CoterieError("no samples were given")
    return Samples(torch.cat([part.x for part in parts]), [name for part in parts for name in part.names])


def read_file(run: Run, path: Path, resize: bool) -> Samples:
    if not path.is_file():
        raise CoterieError(f"{path}: no such file")
    kind = path.suffix.lower()
    if kind not in (".csv", ".npz"):
        return Samples(read_image(run, path, resize)[None], [str(path)])
    x = read_rows(run, path) if kind == ".csv" else as_samples(run, path, "x", read_arrays(path, "x")["x"])
    if not len(x):
        raise CoterieError(f"{path}: there are no samples in it")
    return Samples(x, [f"{path}:{row}" for row in range(len(x))])


def read_labelled(run: Run, path: Path, x_name: str = "x", y_name: str = "y") -> tuple[Tensor, Tensor]:
    """Samples and labels of an .npz file."""
    arrays = read_arrays(path, x_name, y_name)
    x, y = as_samples(run, path, x_name, arrays[x_name]), arrays[y_name]
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise CoterieError(
            f"{path}: {y_name} must be one whole number for each of the {len(x)} samples, "
            f"not {y.dtype} of shape {y.shape}"
        )
    if not len(y):
        raise CoterieError(f"{path}: there are no samples in {x_name}")
    if not 0 <= y.min() <= y.max() < run.classes:
        raise CoterieError(f"{path}: labels from {y.min()} to {y.max()}, but classes are 0 to {run.classes - 1}")
    return x, torch.from_numpy(y.astype(np.int64))


def read_arrays(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                raise CoterieError(f"{path}: no array '{missing[0]}' in it; there are: {', '.join(file) or 'none'}")
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise CoterieError(f"{path}: no such file") from None
    except DAMAGED as error:
        raise CoterieError(f"{path}: not an .npz file, or a damaged one ({damage(error)})") from None


def has_arrays(path: Path, *names: str) -> bool:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return all(name in file for name in names)
    except DAMAGED:
        return False


def as_samples(run: Run, path: Path, name: str, array: NDArray[Any]) -> Tensor:
    """(N, *shape), checked against what the models were trained on."""
    if run.shape[:1] == (1,) and array.shape[1:] == run.shape[1:]:
        array = array[:, None]  # grey images (N, H, W)
    if array.shape[1:] != run.shape or array.ndim != len(run.shape) + 1:
        raise CoterieError(f"{path}: {name} has the shape {array.shape}; needed is (samples, {words(run.shape, ', ')})")
    return as_trained(run, path, array)


def as_trained(run: Run, path: Path, array: NDArray[Any]) -> Tensor:
    """Numbers of the type and range that training saw. Images may also be floats of 0..1."""
    if array.dtype.kind not in "iufb":
        raise CoterieError(f"{path}: holds {array.dtype}, not numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise CoterieError(f"{path}: holds numbers that are not finite")
    if run.dtype != torch.uint8:
        return torch.from_numpy(np.ascontiguousarray(array)).to(run.dtype)
    low, high = (array.min(), array.max()) if array.size else (0, 0)
    if array.dtype.kind == "f" and not (array == np.round(array)).all():
        if not 0 <= low <= high <= 1:
            raise CoterieError(f"{path}: images of fractions must be in 0..1, these are in {low:g}..{high:g}")
        return torch.from_numpy(np.ascontiguousarray(array, np.float32))
    if not 0 <= low <= high <= 255:
        raise CoterieError(f"{path}: images must be in 0..255, these are in {low:g}..{high:g}")
    return torch.from_numpy(np.ascontiguousarray(array, np.uint8))


def read_rows(run: Run, path: Path) -> Tensor:
    """A sample in each row of a CSV file; a first row that is not of numbers is taken for a header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error) as error:
        raise CoterieError(f"{path}: cannot be read ({error})") from None
    if rows and not all(map(is_number, rows[0])):
        rows = rows[1:]
    needed = math.prod(run.shape)
    for number, row in enumerate(rows):
        if len(row) != needed or not all(map(is_number, row)):
            wrong = next((cell for cell in row if not is_number(cell)), None)
            found = f"{len(row)} columns" if len(row) != needed else f"'{wrong}'"
            raise CoterieError(f"{path}, sample {number}: {found}; needed are {needed} numbers and nothing else")
    array = np.array([[float(cell) for cell in row] for row in rows]).reshape(len(rows), *run.shape)
    return as_trained(run, path, array)


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def read_image(run: Run, path: Path, resize: bool) -> Tensor:
    """(C, H, W) pixels, grey or in colour as the models take them."""
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
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.array(picture, np.uint8).reshape(height, width, channels)
    return torch.from_numpy(np.moveaxis(pixels, 2, 0).copy())


def words(shape: tuple[int, ...], between: str = " x ") -> str:
    return between.join(map(str, shape))
