"""Read a dataset from a path, whatever its format."""

from __future__ import annotations

import difflib
import os
import shlex
from pathlib import Path

from coterie.core.errors import CoterieError
from coterie.core.task import Task
from coterie.data.dataset import Dataset
from coterie.data.datasets import is_known
from coterie.data.user.arrays import is_pfllib, read_npz, read_pfllib
from coterie.data.user.hugging_face import is_hugging_face, read_hugging_face
from coterie.data.user.images import read_image_tree
from coterie.data.user.pooled import Pooled, pool
from coterie.data.user.reading import Found, Notes, Reading, entries, readable
from coterie.data.user.tables import KINDS, is_table, read_tables, table_files

FORMS = (
    "a folder with a CSV or Parquet file for each client, a folder of images for each client, an .npz with x, y and "
    "client, one CSV or Parquet file with a client column, a Hugging Face dataset on disk, or a PFLlib folder"
)


def is_path(name: str) -> bool:
    """Whether this is a path rather than the name of a dataset."""
    marked = os.sep in name or name.startswith(("~", ".")) or name.lower().endswith((".npz", *KINDS))
    return marked or (not is_known(name) and os.path.exists(name))


def read_own(path: str | os.PathLike[str], reading: Reading, task: type[Task] | None = None) -> Dataset:
    """Read a user's data; raises an error with the first problem. task: default: that of `reading`, or guessed."""
    where, notes = located(path), Notes()
    pooled = pooled_at(where, reading, notes, task)
    if notes.errors:
        kinds = f", and {len(notes.errors) - 1} more kinds of problems" if len(notes.errors) > 1 else ""
        raise CoterieError(f"{notes.errors[0]}{kinds}. `coterie data check {shlex.quote(str(path))}` lists all")
    last = where.resolve()
    name = readable(last.name if last.is_dir() else last.stem)
    return pooled.dataset(f"own-{name}" if is_known(name) else name or "own", reading)


def located(path: str | os.PathLike[str]) -> Path:
    where = Path(os.path.expanduser(path))
    if not where.exists():
        names = os.listdir(where.parent) if where.parent.is_dir() else []
        near = difflib.get_close_matches(where.name, names, n=1, cutoff=0.75)
        hint = f": did you mean '{where.parent / near[0]}'?" if near else ""
        raise CoterieError(f"{where}: no such file or folder{hint}")
    return where


def pooled_at(path: Path, reading: Reading, notes: Notes, task: type[Task] | None = None) -> Pooled:
    reading.check()
    try:
        found = find(path, reading, notes)
        return pool(found, reading, notes, str(path), task)
    except OSError as error:
        raise CoterieError(f"{error.filename or path}: cannot be read ({error.strerror})") from None
    except MemoryError:
        raise CoterieError(f"{path}: does not fit into memory") from None


def find(path: Path, reading: Reading, notes: Notes) -> Found:
    if reading.resize is not None and (path.is_file() or is_pfllib(path) or table_files(path)):
        raise CoterieError(f"{path}: --resize is for image files, not for tables and arrays")
    if path.is_file():
        if path.suffix.lower() == ".npz":
            return read_npz(path, reading, notes)
        if is_table(path):
            return read_tables([(path, None)], reading, notes, shared=reading.client_column != "")
    elif path.is_dir():
        if is_hugging_face(path):
            return read_hugging_face(path, reading, notes)
        if is_pfllib(path):
            return read_pfllib(path, reading, notes)
        if files := table_files(path):
            return read_tables(files, reading, notes)
        if any(entry.is_dir() for entry in entries(path)):
            return read_image_tree(path, reading, notes)
    raise CoterieError(f"{path}: no data that can be read. Expected: {FORMS}")
