"""Readers of the publishers' file formats: IDX (MNIST family), Python pickles (CIFAR), folders of images (CINIC-10)."""

from __future__ import annotations

import gzip
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError

Bytes = NDArray[np.uint8]


def read_idx(path: Path) -> Bytes:
    """The array of unsigned bytes in an IDX file, gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        zeros, kind, axes = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{axes}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise CoterieError(f"{path}: cannot be read as an IDX file ({error})") from error
    if (zeros, kind) != (0, 8):
        raise CoterieError(f"{path}: not an IDX file of unsigned bytes")
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if values.size != np.prod(shape, dtype=object):  # object: cannot overflow if the header is damaged
        raise CoterieError(f"{path}: {values.size} values, but the header says {shape}")
    return values.reshape(shape)


class Text:
    """Stand-in for `_codecs.encode`, which Python 3 uses to write bytes to old pickle formats."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"unexpected encoding {encoding!r}")
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("text has no state")


class _Uint8:
    """Stand-in for `numpy.dtype`; accepts only uint8."""

    def __init__(self, kind: str | bytes, *flags: object) -> None:
        if kind not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"unexpected array type {kind!r}")

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment do not matter for bytes


class _Array:
    """Stand-in for `numpy.ndarray`; accepts only a shape and raw bytes."""

    values: Bytes

    def __init__(self, *arguments: object) -> None:
        pass  # a class, an empty shape and a type code; __setstate__ gets the content

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not (isinstance(kind, _Uint8) and isinstance(raw, bytes)):
            raise pickle.UnpicklingError("not an array of bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class SafeUnpickler(pickle.Unpickler):
    """Resolves the names in a pickle to stand-ins and refuses all others, so no real class or function is called."""

    dtype: ClassVar[type]
    array: ClassVar[type]

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "_codecs", "encode":
                return Text
            case "numpy", "dtype":
                return self.dtype
            case ("numpy", "ndarray") | ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return self.array
        raise pickle.UnpicklingError(f"'{module}.{name}' is not allowed")


class _CifarUnpickler(SafeUnpickler):
    dtype, array = _Uint8, _Array


def read_pickle(path: Path) -> dict[bytes, Any]:
    """The dictionary in a CIFAR file, with numpy arrays."""
    try:
        with path.open("rb") as file:
            fields = _CifarUnpickler(file, encoding="bytes").load()
        return {
            key.encode() if isinstance(key, str) else key: value.values if isinstance(value, _Array) else value
            for key, value in fields.items()
        }
    except Exception as error:  # a damaged pickle can raise anything
        raise CoterieError(f"{path}: cannot be read as a CIFAR file ({error})") from error


def read_cifar(path: Path, labels: bytes) -> tuple[Bytes, Bytes]:
    """Images (N, 3, 32, 32) and labels (N,) of one CIFAR file."""
    fields = read_pickle(path)
    try:
        x = np.asarray(fields[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        y = np.asarray(fields[labels], np.uint8)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CoterieError(f"{path}: a CIFAR file with unexpected content ({error})") from error
    if y.shape != (len(x),):
        raise CoterieError(f"{path}: {len(x)} images but labels of shape {y.shape}")
    return x, y


def read_image_folders(folder: Path, side: int) -> tuple[Bytes, Bytes, tuple[str, ...]]:
    """Images (N, 3, side, side), labels and class names of `folder/<class>/*.png`, in alphabetical order."""
    try:
        from PIL import Image
    except ImportError:
        raise CoterieError("reading image folders needs Pillow: pip install 'coterie[images]'") from None

    def read(path: Path) -> Bytes:
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise CoterieError(f"{path}: cannot be read as an image ({error})") from error
        if pixels.shape != (side, side, 3):
            raise CoterieError(f"{path}: {pixels.shape[1]}x{pixels.shape[0]} pixels, expected {side}x{side}")
        return pixels.transpose(2, 0, 1)

    try:
        names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    except OSError as error:
        raise CoterieError(f"{folder}: cannot be read as a folder of classes ({error})") from error
    files = [(label, path) for label, name in enumerate(names) for path in sorted((folder / name).glob("*.png"))]
    if not files:
        raise CoterieError(f"{folder}: no class folders with .png files")
    x = np.stack([read(path) for _, path in files])
    return x, np.array([label for label, _ in files], np.uint8), names
