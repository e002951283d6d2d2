"""Folders of images: client/class/*.png, or client/train/class/*.png and client/test/class/*.png."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.pixels import MOST_PIXELS, fitted
from coterie.data.user.reading import (
    OTHER_SHAPE,
    UNREADABLE,
    Array,
    Found,
    Notes,
    Part,
    Reading,
    entries,
    readable,
    shaped,
)

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}


class ClassFolder(NamedTuple):
    """The images of one class of one client."""

    client: str
    split: str | None
    label: str
    files: list[Path]


def read_image_tree(folder: Path, reading: Reading, notes: Notes) -> Found:
    reading.refuse_columns(folder, "folders of images")
    clients = [entry for entry in entries(folder) if entry.is_dir()]
    folders = [own for client in clients for own in class_folders(client, notes)]
    if not any(own.files for own in folders) or {client.name for client in clients} <= {"train", "test"}:
        raise CoterieError(
            f"{folder}: no images of clients. Expected: a folder for each client with CLASS/*.png, or with "
            "train/CLASS/*.png and test/CLASS/*.png"
        )
    parts: dict[tuple[str, str | None], list[tuple[Array, str, Path]]] = {}
    with pillow(reading.resize) as decode:
        first: Array | None = None
        for client, split, label, files in folders:
            own = parts.setdefault((client, split), [])
            for path in files:
                image = decoded(path, str(path), decode, notes)
                first = image if first is None else first
                if image is not None and same(image, first, str(path), notes):
                    own.append((image, label, path))
    made = [_part(client, split, own) for (client, split), own in parts.items()]
    return Found("folders of images", made)


def class_folders(client: Path, notes: Notes) -> Iterator[ClassFolder]:
    inside = [entry for entry in entries(client) if entry.is_dir()]
    splits = {entry.name: entry for entry in inside if entry.name in ("train", "test")}
    divided = bool(splits) and len(splits) == len(inside)
    name = readable(client.name)
    if not inside:
        yield ClassFolder(name, None, "", [])
    for split, folder in splits.items() if divided else [(None, client)]:
        for label in (entry for entry in entries(folder) if entry.is_dir()):
            yield ClassFolder(name, split, readable(label.name), images_in(label, notes))


def images_in(folder: Path, notes: Notes) -> list[Path]:
    files = [path for path in entries(folder) if path.is_file()]
    for path in files:
        if path.suffix.lower() not in ENDINGS:
            notes.worth_knowing("file without an image extension is ignored", str(path))
    return [path for path in files if path.suffix.lower() in ENDINGS]


def _part(client: str, split: str | None, own: list[tuple[Array, str, Path]]) -> Part:
    x = np.stack([image for image, _, _ in own]) if own else np.empty((0, 1), np.uint8)
    paths = [path for _, _, path in own]
    return Part(client, split, x, np.array([label for _, label, _ in own], dtype=str), lambda i: str(paths[i]))


def same(image: Array, first: Array | None, where: str, notes: Notes) -> bool:
    """Whether an image has the shape and type of the first one."""
    if first is None or (image.shape, image.dtype) == (first.shape, first.dtype):
        return True
    own, expected = (shaped(each.shape, each.dtype) for each in (image, first))
    notes.wrong(OTHER_SHAPE, f"{where}: {own}, the first image has {expected}; --resize makes images one size")
    return False


Decode = Callable[[Any], Array]


@contextmanager
def pillow(side: int | None = None) -> Iterator[Decode]:
    """Yield a decoder of image files to arrays (C, H, W): uint8, or float32 in 0..1 for 16-bit images.

    side: pixels to which images are resized and cropped; None: they keep their size.
    """
    try:
        from PIL import Image
    except ImportError:
        raise CoterieError("reading images needs Pillow: pip install 'coterie[images]'") from None

    def decode(source: Any) -> Array:
        with Image.open(source) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels exceed the limit")
            deep, grey = image.mode.startswith("I;16"), image.mode in ("1", "L", "LA", "I", "F")
            if deep:
                plain = Image.fromarray(np.asarray(image, np.float32) / 65535)
            else:
                plain = image.convert("L" if grey else "RGB")
        pixels = np.asarray(plain if side is None else fitted(plain, side, side))
        return pixels[None] if grey or deep else pixels.transpose(2, 0, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about metadata and large images
        yield decode


def decoded(source: Path | bytes, where: str, decode: Decode, notes: Notes) -> Array | None:
    """Decode an image; if it cannot be read, report it and return None."""
    try:
        image = decode(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Exception as error:  # a damaged image can raise anything
        notes.wrong(UNREADABLE, f"{where}: not a valid image ({type(error).__name__})")
        return None
    notes.need(image.nbytes, Path(where))
    return image
