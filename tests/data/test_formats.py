from __future__ import annotations

import gzip
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.core.errors import CoterieError
from coterie.data.formats import read_cifar, read_idx, read_image_folders, read_pickle


def idx(values: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(5,), (3, 4, 2)])
def test_idx_reads_what_was_written(tmp_path: Path, suffix: str, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / f"values{suffix}"
    path.write_bytes(gzip.compress(idx(values)) if suffix else idx(values))
    np.testing.assert_array_equal(read_idx(path), values)


GOOD = idx(np.arange(200, dtype=np.uint8))
HUGE = struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3) + b"few"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut", GOOD[:-1]),
        ("long", GOOD + b"x"),
        ("header", GOOD[:6]),
        ("empty", b""),
        ("floats", struct.pack(">HBBI", 0, 13, 1, 1) + b"1234"),
        ("huge", HUGE),
        ("cut.gz", gzip.compress(GOOD)[:-9]),
        ("plain.gz", GOOD),
        ("flipped.gz", gzip.compress(GOOD)[:12] + b"\xff\xff\xff" + gzip.compress(GOOD)[15:]),
    ],
)
def test_damaged_idx_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CoterieError, match=name):
        read_idx(tmp_path / name)


def cifar(count: int = 3) -> dict[bytes, Any]:
    data = np.arange(count * 3072, dtype=np.uint32).astype(np.uint8).reshape(count, 3072)
    return {b"batch_label": b"training", b"labels": [7, 0, 9][:count], b"data": data, b"filenames": [b"a.png"]}


def as_numpy_1(content: bytes) -> bytes:
    """The names that numpy 1 wrote. Both sides of a text pickle opcode are free of length fields."""
    return content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_cifar_reads_what_was_written(tmp_path: Path, protocol: int, order: Any) -> None:
    fields = cifar()
    fields[b"data"] = np.asarray(fields[b"data"], order=order)
    content = pickle.dumps(fields, protocol)
    (tmp_path / "batch").write_bytes(as_numpy_1(content) if protocol == 2 and order == "C" else content)
    x, y = read_cifar(tmp_path / "batch", b"labels")
    np.testing.assert_array_equal(x.reshape(3, -1), fields[b"data"])
    assert x.shape == (3, 3, 32, 32)
    assert y.tolist() == [7, 0, 9]


def test_python_2_pickle_is_read(tmp_path: Path) -> None:
    """Opcodes as in the publisher's files: byte strings, and the array's bytes as one of them."""
    raw = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01K\x01M\x00\x0c\x86"
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<I", len(raw)) + raw + b"tb"
    )
    (tmp_path / "batch").write_bytes(b"\x80\x02}(U\x06labels](K\x04eU\x04data" + array + b"u.")
    x, y = read_cifar(tmp_path / "batch", b"labels")
    assert (x.tobytes(), y.tolist()) == (raw, [4])


class Calls:
    """A pickle that calls something when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "attack",
    [
        Calls(exec, "import sys; sys.coterie_was_here = True"),
        Calls(eval, "setattr(__import__('sys'), 'coterie_was_here', True)"),
        Calls(np.load, "somewhere"),
        np.array([1.5]),
        np.array([{}], dtype=object),
        np.float64(3),
        Path("x"),
        bytearray(b"x"),
    ],
    ids=lambda attack: attack.call[0].__name__ if isinstance(attack, Calls) else repr(attack),
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickle_with_anything_else_is_refused(tmp_path: Path, attack: object, protocol: int) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps({**cifar(), b"more": attack}, protocol))
    with pytest.raises(CoterieError, match=r"batch: cannot be read as a CIFAR file"):
        read_pickle(tmp_path / "batch")
    assert not hasattr(sys, "coterie_was_here")


def test_stand_ins_cannot_be_changed_by_a_pickle(tmp_path: Path) -> None:
    for name in (b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n"):
        (tmp_path / "batch").write_bytes(b"\x80\x02" + name + b"N}U\x01aK\x01s\x86b.")  # BUILD with slot state
        with pytest.raises(CoterieError, match="batch"):
            read_pickle(tmp_path / "batch")


@pytest.mark.parametrize("keep", [0, 1, 30, 3000, -1])
def test_cut_pickle_is_refused(tmp_path: Path, keep: int) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps(cifar(), 2)[:keep])
    with pytest.raises(CoterieError, match="batch"):
        read_cifar(tmp_path / "batch", b"labels")


@pytest.mark.parametrize("change", [{b"labels": [1]}, {b"labels": [1, 2, 999]}, {b"data": [1, 2]}, {b"labels": None}])
def test_unexpected_cifar_content_is_refused(tmp_path: Path, change: dict[bytes, Any]) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps({**cifar(), **change}, 2))
    with pytest.raises(CoterieError, match="batch"):
        read_cifar(tmp_path / "batch", b"labels")


def test_image_folders(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    for name, image in zip(("frog", "cat"), pixels, strict=True):
        (tmp_path / name).mkdir()
        Image.fromarray(image).save(tmp_path / name / "1.png")
    Image.fromarray(pixels[0, :, :, 0]).save(tmp_path / "cat" / "2.png")  # CINIC has grey images too
    x, y, names = read_image_folders(tmp_path, 4)
    assert (names, y.tolist()) == (("cat", "frog"), [0, 0, 1])
    np.testing.assert_array_equal(x[0], pixels[1].transpose(2, 0, 1))
    np.testing.assert_array_equal(x[1], np.stack([pixels[0, :, :, 0]] * 3))
    with pytest.raises(CoterieError, match=r"1\.png: 4x4 pixels, expected 32x32"):
        read_image_folders(tmp_path, 32)
    (tmp_path / "cat" / "1.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(CoterieError, match=r"1\.png: cannot be read as an image"):
        read_image_folders(tmp_path, 4)
    (tmp_path / "none").mkdir()
    for folder in ("none", "missing", "cat/1.png"):
        with pytest.raises(CoterieError, match=folder):
            read_image_folders(tmp_path / folder, 4)


def test_image_folders_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CoterieError, match="needs Pillow"):
        read_image_folders(tmp_path, 4)
