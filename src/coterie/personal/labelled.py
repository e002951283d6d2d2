"""Read the labelled samples of one client, in any form that `--dataset` takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.core.names import separated
from coterie.data.user.images import class_folders
from coterie.data.user.read import find
from coterie.data.user.reading import Notes, Reading
from coterie.data.user.several_inputs import named_inputs
from coterie.data.user.tables import KINDS, table_files
from coterie.personal.arrays import SampleForm, as_samples, read_arrays, refuse_one_input, samples_of
from coterie.personal.labels import LabelMapping
from coterie.personal.samples import read_image, read_table

FORMS = (
    "a CSV or Parquet file with a label column, an .npz file with x and y, a folder of such tables, a folder with one "
    "folder of images for each class (or train and test with those in them)"
)


@dataclass(frozen=True, kw_only=True)
class LabelledReading:
    """How a file with labels is read."""

    labels: LabelMapping = field(default_factory=LabelMapping)
    label_column: str | None = None
    usual_label: str | None = None  # of the run's own table: used where a table has it
    group_column: str | None = None  # rows with the same value stay together in training or test
    drop_column: str | None = None  # names of unused columns, separated by commas
    resize: bool = False

    @property
    def dropped(self) -> list[str]:
        return separated(self.drop_column or "")


BY_NAME = LabelledReading()


class LabelledPart(NamedTuple):
    split: str | None  # train or test; None: not split
    x: Tensor  # (N, ...) raw
    y: Tensor  # (N, ...) labels of the run's task; (N,) classes
    group: NDArray[Any] | None = None  # (N,) samples of one group stay together


def read_labelled(run: SampleForm, path: str | Path, reading: LabelledReading) -> list[LabelledPart]:
    """All samples of one client, with the run's classes as labels."""
    where = Path(os.path.expanduser(path))
    if not where.exists():
        raise CoterieError(f"{where}: no such file or folder")
    try:
        parts = read_parts(run, where, reading)
    except OSError as error:
        raise CoterieError(f"{error.filename or where}: cannot be read ({error.strerror})") from None
    parts = [part for part in parts if len(part.y)]
    if not parts:
        raise CoterieError(f"{where} has no samples")
    return parts


def read_parts(run: SampleForm, path: Path, reading: LabelledReading) -> list[LabelledPart]:
    kind = path.suffix.lower()
    refuse_one_input(run, path)
    if reading.group_column is not None and not (path.is_file() and kind in KINDS) and not table_files_in(path):
        raise CoterieError(f"{path}: --group-column is for tables; in an .npz file, the array 'group' has the groups")
    if path.is_file() and kind == ".npz":
        return read_npz(run, path, reading)
    if path.is_file() and kind in KINDS:
        return [read_labelled_table(run, path, None, reading)]
    if path.is_dir() and (files := table_files(path)):
        return [read_labelled_table(run, file, split, reading) for file, split in files]
    if path.is_dir() and (parts := read_images(run, path, reading)):
        return parts
    if path.is_dir():
        return read_other(run, path, reading)
    raise CoterieError(f"{path}: no data that can be read; it can be {FORMS}")


def read_labelled_table(run: SampleForm, path: Path, split: str | None, reading: LabelledReading) -> LabelledPart:
    label = (reading.label_column, reading.usual_label)
    table = read_table(run, path, label, reading.dropped, reading.group_column)
    if table.labels is None:
        raise CoterieError(f"{path}: no column with labels; name it with --label-column")
    return LabelledPart(split, table.x, labels_for(run, table.labels, reading, str(path)), table.groups)


def labels_for(run: SampleForm, raw: NDArray[Any], reading: LabelledReading, where: str) -> Tensor:
    """(N, ...) labels in the form of the run's task."""
    if run.classes:
        if raw.dtype.kind == "f":  # 1.0 is class 1
            whole = np.isnan(raw) | (raw % 1 == 0)
            raw = np.where(np.isnan(raw), "", np.where(whole, np.nan_to_num(raw).astype(np.int64), raw).astype(str))
        return reading.labels.classes(raw, run.class_names, where)
    if raw.dtype.kind not in "iuf":
        raise CoterieError(f"{where}: the label {raw.flat[0]!r} is not a number, which {run.task.name} needs")
    y = torch.from_numpy(raw[:, None] if raw.shape[1:] != run.label_shape and raw.ndim == 1 else raw)
    y = y.to(run.task.label_type)
    run.task.check_labels(y, where)
    return y


def read_npz(run: SampleForm, path: Path, reading: LabelledReading) -> list[LabelledPart]:
    """x and y, and x_test and y_test; also as x_train or train_x. classes: names of the labels 0, 1, ..."""
    arrays = read_arrays(path)
    if len(names := np.unique(arrays["client"].astype(str)) if "client" in arrays else ()) > 1:
        raise one_client(path, names)
    named = [("train", "x", "y"), *((s, *pair) for s in ("train", "test") for pair in spellings(s))]
    found = [(split, x, y) for split, x, y in named if x in arrays or y in arrays or named_inputs(arrays, x)]
    if not found:
        raise CoterieError(f"{path}: no arrays 'x' and 'y'; it has: {', '.join(arrays) or 'none'}")
    divided = any(split == "test" for split, _, _ in found)
    parts = [LabelledPart(s if divided else None, *arrays_of(run, path, arrays, (x, y), reading)) for s, x, y in found]
    group = arrays.get("group")
    if group is None or divided:
        return parts
    if group.shape != parts[0].y.shape:
        raise CoterieError(f"{path}: group must be one value for each of the {len(parts[0].y)} samples")
    return [parts[0]._replace(group=group)]


def spellings(split: str) -> tuple[tuple[str, str], ...]:
    return (f"x_{split}", f"y_{split}"), (f"{split}_x", f"{split}_y")


def arrays_of(
    run: SampleForm, path: Path, arrays: dict[str, NDArray[Any]], names: tuple[str, str], reading: LabelledReading
) -> tuple[Tensor, Tensor]:
    x_name, y_name = names
    x = samples_of(run, path, x_name, arrays)
    if y_name not in arrays:
        raise CoterieError(f"{path}: no array '{y_name}'; it has: {', '.join(arrays)}")
    y = arrays[y_name]
    if not run.classes and len(y) == len(x):
        return x, labels_for(run, y, reading, str(path))
    if y.shape != (len(x),) or y.dtype.kind not in "iuUS":
        raise CoterieError(
            f"{path}: {y_name} must be one whole number or name for each of the {len(x)} samples, "
            f"not {y.dtype} of shape {y.shape}"
        )
    y = np.char.decode(y, "utf-8", "replace") if y.dtype.kind == "S" else y
    classes = arrays.get("classes")
    if classes is not None and classes.ndim == 1 and y.dtype.kind in "iu":
        if len(y) and not 0 <= y.min() <= y.max() < len(classes):
            raise CoterieError(f"{path}: labels from {y.min()} to {y.max()}, but 'classes' has {len(classes)} names")
        y = classes.astype(str)[y]
    return x, reading.labels.classes(y, run.class_names, str(path))


def read_images(run: SampleForm, path: Path, reading: LabelledReading) -> list[LabelledPart]:
    """class/*.png, or train/class/*.png and test/class/*.png."""
    found = [folder for folder in class_folders(path, Notes()) if folder.files]
    parts = []
    for split in sorted({folder.split for folder in found}, key=str):
        own = [(file, folder.label) for folder in found if folder.split == split for file in folder.files]
        x = torch.stack([read_image(run, file, reading.resize) for file, _ in own])
        y = reading.labels.classes(np.array([label for _, label in own]), run.class_names, str(path))
        parts.append(LabelledPart(split, x, y))
    return parts


def read_other(run: SampleForm, path: Path, reading: LabelledReading) -> list[LabelledPart]:
    """A folder of clients that holds exactly one."""
    found = find(path, Reading(label_column=reading.label_column), notes := Notes())
    if notes.errors:
        raise CoterieError(str(notes.errors[0]))
    clients = sorted({part.client for part in found.parts})
    if len(clients) != 1:
        raise one_client(path, clients)
    made = []
    for part in found.parts:
        y = np.array(found.classes)[part.y] if found.classes and part.y.dtype.kind in "iu" else part.y
        x = as_samples(run, path, "x", part.x)
        made.append(LabelledPart(part.split, x, labels_for(run, y, reading, str(path))))
    return made


def one_client(path: Path, clients: Sequence[str] | NDArray[Any]) -> CoterieError:
    shown = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
    return CoterieError(f"{path}: holds {len(clients)} clients ({shown}); give the data of one")


def table_files_in(path: Path) -> bool:
    return path.is_dir() and bool(table_files(path))


def joined(parts: Sequence[LabelledPart], split: str | None = None) -> tuple[Tensor, Tensor]:
    """The samples of all parts, or those of one split."""
    own = [part for part in parts if split is None or part.split == split]
    return torch.cat([part.x for part in own]), torch.cat([part.y for part in own])
