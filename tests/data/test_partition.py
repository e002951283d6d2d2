from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from coterie.core.errors import CoterieError
from coterie.data import Dataset, Partition, divide
from coterie.data.picture import picture

PLAIN = Partition("hand-made", (np.array([0, 5]), np.array([3])), (np.array([1]), np.array([2, 7, 9])))
MAKE_PLAIN = """
import numpy as np
from coterie.data import Partition
made = Partition("x", (np.array([0, 5], "i4"), np.array([3])), (np.array([1]), np.array([2, 7, 9])), settings={"a": 1})
print(made.hash)
"""


def full() -> Partition:
    maps = np.array([[0, 1, 2], [2, 0, 1]])
    return Partition("all", PLAIN.train, PLAIN.test, (0, 1), {"alpha": 0.5, "sizes": [1, 2]}, True, maps, (0.0, 72.5))


@pytest.mark.parametrize("made", [PLAIN, full()])
def test_round_trip(tmp_path: Path, made: Partition) -> None:
    made.save(tmp_path / "some.npz")
    read = Partition.load(tmp_path / "some.npz")
    assert read.hash == made.hash
    assert (read.name, read.settings, read.groups) == (made.name, made.settings, made.groups)
    assert (read.merged, read.angles) == (made.merged, made.angles)
    assert [part.tolist() for part in read.train + read.test] == [part.tolist() for part in made.train + made.test]
    assert [file.name for file in tmp_path.iterdir()] == ["some.npz"]


@pytest.mark.long
def test_hash_is_the_same_in_another_process_and_for_another_integer_type() -> None:
    output = subprocess.run([sys.executable, "-c", MAKE_PLAIN], capture_output=True, text=True, check=True).stdout
    assert output.strip() == PLAIN.hash == "6fb2527b5640b508d0042306b9f96aa4f28621a3483d9ce29975bedd372b65d6"


def test_hash_sees_every_part() -> None:
    made = full()
    maps = np.array([[0, 1, 2], [0, 2, 1]])
    others = [
        PLAIN,
        Partition("all", (PLAIN.train[0], PLAIN.test[0]), PLAIN.test, (0, 1), {}, True, made.label_maps, made.angles),
        Partition("all", PLAIN.train, PLAIN.test, (1, 1), {}, True, made.label_maps, made.angles),
        Partition("all", PLAIN.train, PLAIN.test, (0, 1), {}, False, made.label_maps, made.angles),
        Partition("all", PLAIN.train, PLAIN.test, (0, 1), {}, True, maps, made.angles),
        Partition("all", PLAIN.train, PLAIN.test, (0, 1), {}, True, made.label_maps, (0.0, 72.0)),
        # the same samples in the same order, but the border between the clients is elsewhere
        Partition("b", (np.array([0]), np.array([5, 3])), PLAIN.test),
    ]
    assert len({made.hash, *(other.hash for other in others)}) == 1 + len(others)


def test_two_matrices_are_a_partition(tmp_path: Path) -> None:
    np.savez(tmp_path / "theirs.npz", train=np.arange(6, dtype=np.int32).reshape(2, 3), test=np.array([[0], [4]]))
    read = Partition.load(tmp_path / "theirs.npz")
    assert (read.clients, read.train[1].tolist(), read.merged) == (2, [3, 4, 5], False)


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "text", "npy", "pickle", "floats", "sizes", "test"])
def test_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "some.npz"
    PLAIN.save(path)
    content = path.read_bytes()
    arrays: dict[str, Any] = dict(np.load(path))
    if damage in ("empty", "cut", "flip", "text"):
        flipped = content[:60] + bytes(255 - byte for byte in content[60:90]) + content[90:]
        path.write_bytes({"empty": b"", "cut": content[:-40], "flip": flipped, "text": b"hello"}[damage])
    elif damage == "npy":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    elif damage == "test":
        del arrays["test"]
        np.savez(path, **arrays)
    else:
        wrong = {"pickle": ("train", np.array([{}])), "floats": ("train", np.array([0.5, 1.0, 2.0]))}
        name, value = wrong.get(damage, ("train_sizes", np.array([2, 2])))
        np.savez(path, **{**arrays, name: value})
    with pytest.raises(CoterieError, match=r"some\.npz"):
        Partition.load(path)


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="no such partition file"):
        Partition.load(tmp_path / "none.npz")
    with pytest.raises(CoterieError, match="cannot be written"):
        PLAIN.save(tmp_path / "no folder" / "some.npz")


def test_parts_must_agree() -> None:
    with pytest.raises(CoterieError, match="one train part"):
        Partition("wrong", PLAIN.train, PLAIN.test[:1])
    with pytest.raises(CoterieError, match="one train part"):
        Partition("none", (), ())


def test_statistics(tiny: Dataset) -> None:
    made = Partition("mine", (np.array([0, 5, 1]), np.array([0])), (np.array([0]), np.array([1, 2])))
    numbers = made.statistics(tiny.labels)
    assert numbers.train_counts.tolist() == [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert numbers.test_sizes.tolist() == [1, 2]
    assert numbers[4:] == (4, 3, 3, 3)
    with pytest.raises(CoterieError, match="is the partition of another dataset"):
        Partition("other", (np.array([40]),), (np.array([0]),)).statistics(tiny.labels)


def test_picture(tiny: Dataset) -> None:
    svg = divide(tiny, "dirichlet", num_clients=4, alpha=1, seed=3).picture(tiny.labels._replace(name="a<b & c"))
    root = ElementTree.fromstring(svg)
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith(("text", "title"))]
    assert {"client", "class", "a", "e", "0", "3"} <= set(texts)
    tooltips = [text for text in texts if text.startswith("client ")]
    made = divide(tiny, "dirichlet", num_clients=4, alpha=1, seed=3).statistics(tiny.labels)
    assert sum(int(text.split(": ")[1]) for text in tooltips) == made.train_slots == 43


def test_the_title_of_a_picture_fits_on_a_phone() -> None:
    title = "a dataset with a name, dirichlet with a concentration of 0.1: 100 clients, 60000 training samples"
    root = ElementTree.fromstring(picture(title, np.ones((100, 2), np.int64), ["a", "b"]))
    lines = [str(node.text) for node in root.iter() if node.tag.endswith("text") and node.get("x") == "8"]
    assert " ".join(lines).startswith(title)
    assert max(map(len, lines)) <= 48
    tops = [float(node.get("y", 0)) for node in root.iter() if node.tag.endswith("text")]
    assert tops.index(min(tops)) == 0
    assert float(next(node for node in root.iter() if node.tag.endswith("line")).get("y1", 0)) > 18 + 16 * len(lines)
