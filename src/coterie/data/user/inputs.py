"""The shape and type of users' samples: images, series, tables, tokens."""

from __future__ import annotations

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.statistics import CHANNELS
from coterie.data.user.reading import Array, Notes, Part


def as_input(part: Part, kind: str, notes: Notes) -> Part:
    """Convert the samples of a part to the shape and type that networks take. kind: one of INPUTS.

    Shapes do not change, except that the channels of images are moved first. Bytes with three axes are pixels and stay
    uint8; other integers with one or two axes become int64; floats stay float16 or become float32.
    """
    x, where = part.x, part.place(0)
    if x.dtype.kind not in "buif":
        raise CoterieError(f"{where}: samples of type {x.dtype}, shape {x.shape[1:]}; they must be numbers")
    if x.ndim == 1:
        x = x[:, None]
    make = {"auto": _auto, "image": _image, "series": _series, "values": _values, "tokens": _tokens}[kind]
    return part._replace(x=np.ascontiguousarray(make(x, where, notes)))


def _auto(x: Array, where: str, notes: Notes) -> Array:
    if x.dtype == np.uint8 and x.ndim >= 4:
        return channels_first(x, notes)
    if x.dtype.kind in "iu" and x.ndim <= 3:
        if x.dtype == np.uint8 and x.ndim == 3:
            once(notes, f"bytes of {size(x)} are read as tokens; for grayscale images use --input image")
        elif x.size and x.min() < 0:
            once(notes, "negative integers cannot be tokens; for features use --input values")
        return _tokens(x, where, notes)
    if x.ndim == 4 and is_channels_last(x):
        once(notes, f"samples of {size(x)} may be images with channels last; --input image moves the channels first")
    return _values(x, where, notes)


def _image(x: Array, where: str, notes: Notes) -> Array:
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4:
        raise CoterieError(f"{where}: --input image takes samples (H, W), (C, H, W) or (H, W, C), got {size(x)}")
    if x.dtype.kind in "iu" and x.dtype != np.uint8 and x.size and x.min() >= 0 and x.max() <= 255:
        x = x.astype(np.uint8)
    return channels_first(x if x.dtype == np.uint8 else _values(x, where, notes), notes)


def _series(x: Array, where: str, notes: Notes) -> Array:
    if x.ndim != 3:
        raise CoterieError(f"{where}: --input series takes samples (C, T) or (T, F), got {size(x)}")
    return _values(x, where, notes)


def _values(x: Array, where: str, notes: Notes) -> Array:
    if x.dtype == np.float16:
        return x
    with np.errstate(over="ignore"):  # overflow becomes infinite, which is reported
        return x.astype(np.float32)


def _tokens(x: Array, where: str, notes: Notes) -> Array:
    if x.dtype.kind == "f":
        if not (np.isfinite(x).all() and (x == np.trunc(x)).all()):
            raise CoterieError(f"{where}: --input tokens takes whole numbers; some values are fractions or missing")
    elif x.dtype == np.uint64 and x.size and x.max() > np.iinfo(np.int64).max:
        raise CoterieError(f"{where}: a token of {x.max()} is too large")
    return x.astype(np.int64)


def is_channels_last(x: Array) -> bool:
    return x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS


def channels_first(x: Array, notes: Notes) -> Array:
    if not is_channels_last(x):
        return x
    first = np.moveaxis(x, 3, 1)
    once(notes, f"images of {size(x)} have their channels last; read as {size(first)}")
    return first


def size(x: Array) -> str:
    return " x ".join(map(str, x.shape[1:]))


def once(notes: Notes, what: str) -> None:
    """Report something that concerns all samples."""
    if what not in notes.done:
        notes.done.append(what)
