"""Arrays: one .npz for all clients, and PFLlib's folders with an .npz for each client."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from coterie.core.data import Column
from coterie.core.errors import CoterieError
from coterie.data.user.bounds import small_text
from coterie.data.user.labels import as_labels
from coterie.data.user.pickled import read_pickled_dict
from coterie.data.user.reading import (
    UNREADABLE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    as_names,
    by_client,
    entries,
    readable,
    rows_in,
)
from coterie.data.user.several_inputs import samples_in, typed


def read_npz(path: Path, reading: Reading, notes: Notes) -> Found:
    """Read arrays x, y and client; or one of each per split, as train_x and test_x (or x_train and x_test).

    Samples with several inputs are arrays x.NAME instead of x, such as x.image and x.age.
    Optional arrays: group (samples that stay together), classes (their names) and columns (names of the features).
    """
    reading.refuse_columns(path, "an .npz file, which has arrays x, y, client and group")
    content = load_npz(path, notes)
    kinds = ("x", "y", "client", "group")
    parts: list[Part] = []
    for split in ("train", "test"):
        own = {k: content.get(f"{split}_{k}", content.get(f"{k}_{split}")) for k in kinds}
        for key in (f"{split}_x", f"x_{split}"):
            own["x"] = own["x"] if own["x"] is not None else samples_in(content, key, str(path))
        if any(values is not None for values in own.values()):
            parts += samples(path, own, split, notes)
    if not parts:
        own = {**{k: content.get(k) for k in kinds}, "x": samples_in(content, "x", str(path))}
        parts = samples(path, own, None, notes)
    parts = [typed(part, {}, notes) for part in parts]
    known = {
        *kinds,
        "classes",
        "columns",
        *(n for s in ("train", "test") for k in kinds for n in (f"{s}_{k}", f"{k}_{s}")),
    }
    of_samples = ("x", "train_x", "x_train", "test_x", "x_test")
    unused = [name for name in content if name not in known and name.partition(".")[0] not in of_samples]
    if unused:
        notes.done.append(f"unused arrays: {', '.join(unused[:12])}; used names: {', '.join(kinds)}")
    return Found("one .npz file", parts, names_in(content, "classes"), (), columns_in(content, parts, path))


def names_in(content: dict[str, Array], key: str) -> tuple[str, ...] | None:
    return tuple(str(name) for name in content[key]) if content.get(key, np.array(0)).ndim == 1 else None


def columns_in(content: dict[str, Array], parts: list[Part], path: Path) -> tuple[Column, ...]:
    names = names_in(content, "columns") or ()
    if names and any(part.x.shape[1:] != (len(names),) for part in parts):
        raise CoterieError(f"{path}: {len(names)} names in 'columns' for samples of shape {parts[0].x.shape[1:]}")
    return tuple(Column(name) for name in names)


def samples(path: Path, arrays: dict[str, Array | None], split: str | None, notes: Notes) -> list[Part]:
    of = f" of the {split} split" if split else ""
    found: dict[str, Array] = {}
    for name, values in arrays.items():
        if name == "group" and values is None:
            continue
        if values is None:
            raise CoterieError(
                f"{path}: array '{name}'{of} is missing. Needed: x (samples), y (labels) and client (of each sample); "
                "or train_x, train_y, train_client, test_x, test_y, test_client"
            )
        found[name] = values
    x, y, client = found["x"], found["y"], found["client"]
    group = found.get("group")
    one_axis = [values for values in (client, group) if values is not None]
    if x.ndim == 0 or len(y.shape[:1]) != 1 or len(y) != len(x) or any(v.shape != (len(x),) for v in one_axis):
        shapes = ", ".join(f"{name} {values.shape}" for name, values in found.items())
        raise CoterieError(f"{path}: {', '.join(found)}{of} must be equally long, all but x with 1 axis; got {shapes}")
    place = rows_in(f"{path}{of}")
    names = None if group is None else as_names(group, place)
    return by_client(x, as_labels(y, place), client, split, place, names)


def load_npz(path: Path, notes: Notes) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            notes.need(sum(entry.file_size for entry in archive.infolist()), path)
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            content = {name: values for name, values in file.items() if isinstance(values, np.ndarray)}
        for name, values in content.items():
            if values.size and not values.dtype.itemsize:  # a tiny file can claim any number of them
                raise CoterieError(f"{path}: the array '{name}' holds {values.size:,} empty values")
        return content
    except CoterieError:
        raise
    except Exception as error:  # a damaged file can raise anything
        if "allow_pickle" in str(error):
            raise CoterieError(f"{path}: holds Python objects, which are not loaded; store plain arrays") from None
        raise CoterieError(f"{path}: not a valid .npz file ({error})") from None


# PFLlib


def is_pfllib(folder: Path) -> bool:
    return (folder / "train").is_dir() and any(p.suffix == ".npz" for p in entries(folder / "train"))


def read_pfllib(folder: Path, reading: Reading, notes: Notes) -> Found:
    """Read config.json, train/0.npz, test/0.npz, ...: pickled dictionaries of x and y, parsed without running them."""
    reading.refuse_columns(folder, "PFLlib folders")
    classes = _class_count(folder / "config.json")
    parts = []
    for split in ("train", "test"):
        for path in entries(folder / split) if (folder / split).is_dir() else []:
            if path.suffix != ".npz":
                continue
            try:
                parts.append(_client(path, split, notes))
            except CoterieError as error:
                notes.wrong(UNREADABLE, str(error))
    names = tuple(map(str, range(classes))) if classes else None
    return Found("PFLlib folders", parts, names)


def _client(path: Path, split: str, notes: Notes) -> Part:
    content = read_pickled_dict(path, notes)
    x, y = content.get("x"), content.get("y")
    if x is None or y is None:
        raise CoterieError(f"{path}: array 'x' or 'y' is missing; is this a text dataset?")
    if x.ndim == 0 or y.ndim == 0 or len(y) != len(x):
        raise CoterieError(f"{path}: x of shape {x.shape} does not match y of shape {y.shape}")
    place = rows_in(path)
    return Part(readable(path.stem), split, x, as_labels(y, place), place)


def _class_count(path: Path) -> int | None:
    try:
        config = json.loads(small_text(path))
        count = config.get("num_classes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CoterieError(f"{path}: cannot be read ({error})") from None
    if count is not None and not (isinstance(count, int) and 0 < count <= 10_000):
        raise CoterieError(f"{path}: num_classes must be an integer from 1 to 10,000, got {count}")
    return count
