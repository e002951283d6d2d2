"""Which samples each client has: the result of every partition rule."""

from __future__ import annotations

import hashlib
import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.data.picture import picture

Indices = NDArray[np.int64]
MOST_BYTES = 2**32  # limit for all arrays of a file together


class Labels(NamedTuple):
    """The part of a dataset that a partition rule sees."""

    name: str
    train: Indices  # (N,) class of every train sample
    test: Indices
    names: tuple[str, ...]  # class names
    owners: tuple[Indices, Indices] | None = None  # (N,) client of every train and test sample, if known

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def merged(self) -> Indices:
        return np.concatenate([self.train, self.test])


class Statistics(NamedTuple):
    """Sizes and class counts of a partition. Slots count a sample once for each client that has it."""

    train_sizes: Indices  # (m,)
    test_sizes: Indices
    train_counts: Indices  # (m, K) after relabeling
    test_counts: Indices
    train_slots: int
    train_distinct: int
    test_slots: int
    test_distinct: int


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """Client i has samples `train[i]` and `test[i]`: indices into the official train and test split, or, if
    `merged`, into the concatenation of both."""

    name: str
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    groups: tuple[int, ...] = ()  # group of each client; clients of a group have the same distribution
    settings: dict[str, Any] = field(default_factory=dict)  # of the rule
    merged: bool = False
    label_maps: Indices | None = None  # (m, K) concept shift: client i's label for class k
    angles: tuple[float, ...] | None = None  # (m,) feature skew: degrees, counterclockwise

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (0,) * len(self.train))
        lengths = {
            len(part) for part in (self.train, self.test, self.groups, self.angles, self.label_maps) if part is not None
        }
        if len(lengths) != 1 or not self.train:
            raise CoterieError("a partition needs one train part, one test part and one group per client")

    def __repr__(self) -> str:
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        return f"Partition {self.name}: {self.clients} clients{settings}"

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def hash(self) -> str:
        """SHA-256 of the assignment, without name and settings."""
        digest = hashlib.sha256()
        for name, array in sorted(self._content().items()):
            little = array.astype(array.dtype.newbyteorder("<"))
            digest.update(f"{name} {little.dtype.str} {little.shape}\n".encode() + little.tobytes())
        return digest.hexdigest()

    def check(self, labels: Labels) -> None:
        """Raise an error if the partition does not fit this dataset."""
        both = len(labels.train) + len(labels.test)
        for split, parts, y in (("train", self.train, labels.train), ("test", self.test, labels.test)):
            samples = both if self.merged else len(y)
            for client, part in enumerate(parts):
                if len(part) and not 0 <= part.min() <= part.max() < samples:
                    raise CoterieError(
                        f"client {client} has {split} samples {part.min()} to {part.max()}, but {labels.name} has "
                        f"{samples}: is the partition of another dataset?"
                    )
        known = np.arange(labels.classes)
        if self.label_maps is not None and any(not np.array_equal(np.sort(own), known) for own in self.label_maps):
            raise CoterieError(f"label_maps must be a permutation of the {labels.classes} classes for each client")

    def statistics(self, labels: Labels) -> Statistics:
        self.check(labels)
        y_train, y_test = (labels.merged, labels.merged) if self.merged else (labels.train, labels.test)
        train, test = np.concatenate(self.train), np.concatenate(self.test)
        return Statistics(
            np.array([len(part) for part in self.train]),
            np.array([len(part) for part in self.test]),
            self._counts(y_train, self.train, labels.classes),
            self._counts(y_test, self.test, labels.classes),
            len(train),
            len(np.unique(train)),
            len(test),
            len(np.unique(test)),
        )

    def picture(self, labels: Labels) -> str:
        """An SVG of the class counts of each client."""
        numbers = self.statistics(labels)
        title = (
            f"{labels.name}, {self.name}: {self.clients} clients, {numbers.train_slots} training samples "
            f"({numbers.train_distinct} distinct)"
        )
        return picture(title, numbers.train_counts, labels.names)

    def _counts(self, y: Indices, parts: Sequence[Indices], classes: int) -> Indices:
        maps = np.tile(np.arange(classes), (self.clients, 1)) if self.label_maps is None else self.label_maps
        return np.stack([np.bincount(maps[i][y[part]], minlength=classes) for i, part in enumerate(parts)])

    def _content(self) -> dict[str, Any]:
        content = {"groups": np.array(self.groups, np.int64), "merged": np.array(self.merged)}
        for name, parts in (("train", self.train), ("test", self.test)):
            content[name] = np.concatenate(parts).astype(np.int64)
            content[f"{name}_sizes"] = np.array([len(part) for part in parts], np.int64)
        if self.label_maps is not None:
            content["label_maps"] = np.asarray(self.label_maps, np.int64)
        if self.angles is not None:
            content["angles"] = np.array(self.angles, np.float64)
        return content

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file, which `load` reads."""
        try:
            with open(path, "wb") as stream:
                self.write(stream)
        except OSError as error:
            raise CoterieError(f"{path}: cannot be written ({error.strerror})") from error

    def write(self, stream: IO[bytes]) -> None:
        """Like `save`, into an open file."""
        about = np.array(json.dumps({"name": self.name, "settings": self.settings}))
        np.savez_compressed(stream, about=about, **self._content())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote, or any .npz with two matrices `train` and `test` that have a row per client."""
        try:
            with open(path, "rb") as stream:
                return cls.read(stream, path)
        except FileNotFoundError:
            raise CoterieError(f"{path}: no such partition file") from None
        except OSError as error:
            raise CoterieError(f"{path}: cannot be read ({error.strerror})") from None

    @classmethod
    def read(cls, stream: IO[bytes], path: str | os.PathLike[str]) -> Self:
        """Like `load`, from an open file. path: for error messages."""
        try:
            content = arrays_of(stream)
            about = json.loads(str(content.get("about", '{"name": "file", "settings": {}}')))
            angles, maps = content.get("angles"), content.get("label_maps")
            return cls(
                name=str(about["name"]),
                train=_rows(content, "train"),
                test=_rows(content, "test"),
                groups=tuple(content["groups"].tolist()) if "groups" in content else (),
                settings=dict(about["settings"]),
                merged=bool(content.get("merged", False)),
                label_maps=None if maps is None else maps.astype(np.int64),
                angles=None if angles is None else tuple(angles.tolist()),
            )
        except DAMAGED as error:
            raise CoterieError(f"{path}: not a valid partition file ({damage(error)})") from error


DAMAGED = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError,
           RuntimeError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error)  # fmt: skip


def damage(error: Exception) -> str:
    """The error's message, except NumPy's on pickled objects, which recommends allow_pickle."""
    return "no arrays, or of Python objects, which are not loaded" if "allow_pickle" in str(error) else str(error)


def arrays_of(stream: IO[bytes]) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file; their size is checked before they are unpacked."""
    with zipfile.ZipFile(stream) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MOST_BYTES:
        raise ValueError(f"its arrays take {size:,} bytes; the limit is {MOST_BYTES:,}")
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as file:
        return dict(file)


def _rows(content: dict[str, NDArray[Any]], name: str) -> tuple[Indices, ...]:
    values = content[name]
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {values.dtype}, not indices")
    values = values.astype(np.int64)
    if f"{name}_sizes" not in content:
        return tuple(row for row in values.reshape(len(values), -1))
    sizes = content[f"{name}_sizes"]
    if sizes.sum() != len(values) or (sizes < 0).any():
        raise ValueError(f"{len(values)} {name} samples for sizes that sum to {sizes.sum()}")
    return tuple(np.split(values, np.cumsum(sizes)[:-1]))
