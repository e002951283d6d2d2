"""Arrays: one .npz for all clients, and PFLlib's folders with an .npz for each client."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.own.pickled import read_pickled_dict
from coterie.data.own.reading import (
    UNREADABLE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    by_client,
    entries,
    readable,
    upright,
    whole_labels,
)


def read_npz(path: Path, reading: Reading, notes: Notes) -> Found:
    """x, y, client; or each of them twice, as train_x and test_x (or x_train and x_test). Also classes: their names."""
    content = load_npz(path, notes)
    parts: list[Part] = []
    for split in ("train", "test"):
        own = {k: content.get(f"{split}_{k}", content.get(f"{k}_{split}")) for k in ("x", "y", "client")}
        if any(values is not None for values in own.values()):
            parts += samples(path, own, split, notes)
    if not parts:
        parts = samples(path, {k: content.get(k) for k in ("x", "y", "client")}, None, notes)
    names = tuple(str(name) for name in content["classes"]) if content.get("classes", np.array(0)).ndim == 1 else None
    return Found("one .npz file", parts, names)


def samples(path: Path, arrays: dict[str, Array | None], split: str | None, notes: Notes) -> list[Part]:
    of = f" of the {split} split" if split else ""
    found: dict[str, Array] = {}
    for name, values in arrays.items():
        if values is None:
            raise CoterieError(
                f"{path}: there is no array '{name}'{of}. Needed: x (samples), y (labels) and client (whose each is); "
                "or train_x, train_y, train_client, test_x, test_y, test_client"
            )
        found[name] = values
    x, y, client = found["x"], found["y"], found["client"]
    if x.ndim == 0 or y.shape != (len(x),) or client.shape != (len(x),):
        shapes = ", ".join(f"{name} {values.shape}" for name, values in found.items())
        raise CoterieError(f"{path}: x, y and client{of} must be equally long, y and client of one axis: {shapes}")

    def place(i: int) -> str:
        return f"{path}{of}, row {i}"

    return by_client(upright(x), whole_labels(y, notes, place), client, split, place)


def load_npz(path: Path, notes: Notes) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            notes.need(sum(entry.file_size for entry in archive.infolist()), path)
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: values for name, values in file.items() if isinstance(values, np.ndarray)}
    except CoterieError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        if "allow_pickle" in str(error):
            raise CoterieError(f"{path}: holds Python objects, which are not read; store plain arrays") from None
        raise CoterieError(f"{path}: not an .npz file, or a damaged one ({error})") from None


# PFLlib


def is_pfllib(folder: Path) -> bool:
    return (folder / "train").is_dir() and any(p.suffix == ".npz" for p in entries(folder / "train"))


def read_pfllib(folder: Path, reading: Reading, notes: Notes) -> Found:
    """config.json, train/0.npz, test/0.npz, ...: each a pickled dictionary of x and y, which is not run but parsed."""
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
    return Found("PFLlib's folders", parts, names)


def _client(path: Path, split: str, notes: Notes) -> Part:
    content = read_pickled_dict(path, notes)
    x, y = content.get("x"), content.get("y")
    if x is None or y is None:
        raise CoterieError(f"{path}: there is no array 'x' or no array 'y' in it; is it a dataset of text?")
    if x.ndim == 0 or y.shape != (len(x),):
        raise CoterieError(f"{path}: x of shape {x.shape} does not go with y of shape {y.shape}")
    place = rows_of(path)
    return Part(readable(path.stem), split, upright(x), whole_labels(y, notes, place), place)


def rows_of(path: Path) -> Callable[[int], str]:
    return lambda i: f"{path}, row {i}"


def _class_count(path: Path) -> int | None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        count = config.get("num_classes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CoterieError(f"{path}: cannot be read ({error})") from None
    if count is not None and not (isinstance(count, int) and 0 < count <= 10_000):
        raise CoterieError(f"{path}: num_classes is {count}; it must be a number from 1 to 10,000")
    return count
