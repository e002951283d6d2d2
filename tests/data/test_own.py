"""Data of users: files written with csv, Pillow, numpy, pyarrow and datasets are read back, sample by sample."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import coterie
from coterie.cli import main
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.data import describe_input
from coterie.data.user import Reading, check
from coterie.data.user.split import choose_test, digests

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the tests' writer of datasets asks nobody
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

Table = dict[str, tuple[np.ndarray[Any, Any], list[Any]]]  # client -> samples (n, ...), labels


def numbers(seed: int = 0, clients: Sequence[str] = ("Zürich Süd", "b2", "b10"), rows: int = 12) -> Table:
    """Values that float32 keeps exactly; labels yes and no in turn."""
    draw = np.random.default_rng(seed)
    return {
        name: (draw.integers(-999, 999, (rows + i, 3)).astype(np.float32) / 8, ["yes", "no"] * ((rows + i) // 2 + 1))
        for i, name in enumerate(clients)
    }


def write_csv(
    path: Path, x: np.ndarray[Any, Any], y: Sequence[Any], label: str = "label", delimiter: str = ","
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow([*(f"column {i}" for i in range(x.shape[1])), label])
        rows.writerows([*row, own] for row, own in zip(x.tolist(), y, strict=False))


def held(data: FederatedData, client: int) -> list[tuple[bytes, str]]:
    """All samples of a client, train and test, each with the name of its class, in any order."""
    found = []
    for split in (data.train, data.test):
        x, y = split.client(client)
        found += [(row.numpy().tobytes(), data.class_names[k]) for row, k in zip(x, y.tolist(), strict=True)]
    return sorted(found)


def written(x: np.ndarray[Any, Any], y: Sequence[Any]) -> list[tuple[bytes, str]]:
    return sorted((row.tobytes(), str(label)) for row, label in zip(x, y, strict=False))


def names(data: FederatedData) -> list[str]:
    return list(data.client_names)


def problems(path: Path, **reading: Any) -> dict[str, Any]:
    return {p.what.split(";")[0]: p for p in check(path, Reading(**reading)).problems}


# Every form


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_for_each_client(tmp_path: Path, delimiter: str) -> None:
    folder = tmp_path / "my data ✓"
    tables = numbers()
    for name, (x, y) in tables.items():
        write_csv(folder / f"{name}.csv", x, y, delimiter=delimiter)
    data = coterie.load_clients(str(folder))
    assert names(data) == ["Zürich Süd", "b2", "b10"]
    assert data.class_names == ("no", "yes")
    assert (data.name, data.shape, data.train.x.dtype) == ("my data ✓", (3,), torch.float32)
    for client, name in enumerate(names(data)):
        assert held(data, client) == written(*tables[name])
    sizes = [len(tables[name][0]) for name in names(data)]
    assert [a + b for a, b in zip(data.train.sizes, data.test.sizes, strict=True)] == sizes
    assert list(data.test.sizes) == [round(n / 4) for n in sizes]


def test_given_splits_stay(tmp_path: Path) -> None:
    for split, seed in (("train", 0), ("test", 1)):
        for name, (x, y) in numbers(seed).items():
            write_csv(tmp_path / split / f"{name}.csv", x, y, "Target")
    data = coterie.load_clients(str(tmp_path))
    for client, name in enumerate(names(data)):
        for split, seed in ((data.train, 0), (data.test, 1)):
            x, y = numbers(seed)[name]
            got, labels = split.client(client)
            np.testing.assert_array_equal(got.numpy(), x)
            assert [data.class_names[k] for k in labels] == y[: len(x)]
    assert "split" not in data.partition.settings


def one_table() -> tuple[np.ndarray[Any, Any], list[str], list[int]]:
    draw = np.random.default_rng(3)
    x = draw.integers(0, 99, (40, 2)).astype(np.float32)
    return x, [f"ward {i % 3}" for i in range(40)], draw.integers(0, 4, 40).tolist()


def assert_wards(data: FederatedData) -> None:
    x, wards, y = one_table()
    assert names(data) == ["ward 0", "ward 1", "ward 2"]
    for client, name in enumerate(names(data)):
        rows = [i for i, ward in enumerate(wards) if ward == name]
        assert held(data, client) == written(x[rows], [y[i] for i in rows])


def test_one_csv_with_a_column_for_the_client(tmp_path: Path) -> None:
    x, wards, y = one_table()
    with (tmp_path / "all.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "Ward", "b", "outcome"], *zip(x[:, 0], wards, x[:, 1], y, strict=True)])
    named = {"label_column": "outcome", "client_column": "Ward"}
    assert_wards(coterie.load_clients(str(tmp_path / "all.csv"), **named))
    with pytest.raises(CoterieError, match=r"which column is the label.*--label-column.*outcome"):
        coterie.load_clients(str(tmp_path / "all.csv"))
    with pytest.raises(CoterieError, match=r"'outcom'.*did you mean 'outcome'"):
        coterie.load_clients(str(tmp_path / "all.csv"), label_column="outcom")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    x, wards, y = one_table()
    table = pyarrow.table({"a": x[:, 0].astype(np.int32), "b": x[:, 1].astype(np.float64), "client": wards, "y": y})
    parquet.write_table(table, tmp_path / "all.parquet")
    assert_wards(coterie.load_clients(str(tmp_path / "all.parquet")))
    folder = tmp_path / "each"
    folder.mkdir()
    for ward in sorted(set(wards)):
        rows = [i for i, own in enumerate(wards) if own == ward]
        parquet.write_table(table.take(rows).drop_columns(["client"]), folder / f"{ward}.parquet")
    assert_wards(coterie.load_clients(str(folder)))


def test_npz(tmp_path: Path) -> None:
    x, wards, y = one_table()
    np.savez(tmp_path / "all.npz", x=x, y=np.array(y), client=np.array(wards))
    assert_wards(coterie.load_clients(str(tmp_path / "all.npz")))


@pytest.mark.parametrize("name", ["{split}_{what}", "{what}_{split}"])
@pytest.mark.parametrize("kind", ["uint8", "float16", "int64", "float64"])
def test_npz_of_images(tmp_path: Path, name: str, kind: str) -> None:
    draw = np.random.default_rng(0)
    content = {"classes": np.array(["cat", "dog", "emu"])}
    for split, n in (("train", 20), ("test", 11)):
        arrays = {
            "x": draw.integers(0, 256, (n, 6, 5, 3)).astype(kind),  # channels last
            "y": draw.integers(0, 2, n),
            "client": np.arange(n) % 2 + 7,
        }
        content |= {name.format(split=split, what=what): values for what, values in arrays.items()}
    np.savez_compressed(tmp_path / "images.npz", **content)
    data = coterie.load_clients(str(tmp_path / "images.npz"), input="auto" if kind == "uint8" else "image")
    assert (names(data), data.class_names, data.shape) == (["7", "8"], ("cat", "dog", "emu"), (3, 6, 5))
    kept = {"int64": "uint8", "float64": "float32"}.get(kind, kind)  # whole numbers from 0 to 255 are pixels
    assert str(data.train.x.dtype) == f"torch.{kept}"
    for split, given in ((data.train, "train"), (data.test, "test")):
        owner = content[name.format(split=given, what="client")]
        for client in (0, 1):
            got, labels = split.client(client)
            own = owner == client + 7
            np.testing.assert_array_equal(
                got.numpy(),
                content[name.format(split=given, what="x")][own].transpose(0, 3, 1, 2).astype(got.numpy().dtype),
            )
            assert labels.tolist() == content[name.format(split=given, what="y")][own].tolist()


def write_images(folder: Path, split: bool, colour: bool = True) -> dict[tuple[str, str, str], list[Any]]:
    from PIL import Image

    draw = np.random.default_rng(5)
    made: dict[tuple[str, str, str], list[Any]] = {}
    for client in ("Frau Müller", "client 10", "client 9"):
        for part in ("train", "test") if split else ("",):
            for label in ("cat", "a dog"):
                at = folder / client / part / label
                at.mkdir(parents=True)
                for i in range(4):
                    pixels = draw.integers(0, 256, (5, 4, 3) if colour else (5, 4), np.uint8)
                    Image.fromarray(pixels).save(at / f"{i}.png")
                    whole = pixels.transpose(2, 0, 1) if colour else pixels[None]
                    made.setdefault((client, part, label), []).append(whole)
    return made


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_folders_of_images(tmp_path: Path, split: bool, colour: bool) -> None:
    made = write_images(tmp_path, split, colour)
    data = coterie.load_clients(str(tmp_path))
    assert names(data) == ["Frau Müller", "client 9", "client 10"]
    assert (data.class_names, data.shape) == (("a dog", "cat"), (3 if colour else 1, 5, 4))
    for client, name in enumerate(names(data)):
        own = [(image, key[2]) for key, images in made.items() if key[0] == name for image in images]
        assert held(data, client) == written(np.stack([i for i, _ in own]), [label for _, label in own])
        if split:
            x, y = data.test.client(client)
            right = np.stack(made[name, "test", "a dog"] + made[name, "test", "cat"])
            np.testing.assert_array_equal(x.numpy(), right)
            assert y.tolist() == [0] * 4 + [1] * 4


@pytest.mark.long
def test_hugging_face_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    x, wards, y = one_table()
    features = datasets.Features(
        {
            "a": datasets.Value("float32"),
            "b": datasets.Value("int32"),
            "grade": datasets.ClassLabel(names=["0", "1", "2", "3"]),
            "site": datasets.Value("string"),
        }
    )
    content = {"a": x[:, 0].tolist(), "b": x[:, 1].astype(int).tolist(), "grade": y, "site": wards}
    made = datasets.Dataset.from_dict(content, features)
    made.save_to_disk(str(tmp_path / "table"))
    assert_wards(coterie.load_clients(str(tmp_path / "table")))
    made.select(range(39, -1, -1)).save_to_disk(str(tmp_path / "shards"), num_shards=3)
    assert_wards(coterie.load_clients(str(tmp_path / "shards")))


def test_hugging_face_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (18, 5, 6, 3), np.uint8)
    for form, feature, values in (
        ("image", datasets.Image(), [Image.fromarray(image) for image in pixels]),
        ("array", datasets.Array3D((5, 6, 3), "uint8"), pixels),
        ("nested", datasets.Sequence(datasets.Sequence(datasets.Sequence(datasets.Value("uint8")))), pixels.tolist()),
    ):
        kinds = {"img": feature, "label": datasets.ClassLabel(names=["ant", "bee"]), "user": datasets.Value("int64")}
        content = {"img": values, "label": [i % 2 for i in range(18)], "user": [i // 9 for i in range(18)]}
        whole = datasets.Dataset.from_dict(content, datasets.Features(kinds))
        parts = {"train": whole.select([i for i in range(18) if i % 3]), "test": whole.select(range(0, 18, 3))}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / form))
        data = coterie.load_clients(str(tmp_path / form))
        assert (data.class_names, data.shape, data.train.x.dtype) == (("ant", "bee"), (3, 5, 6), torch.uint8), form
        for split, rows in ((data.train, [i for i in range(18) if i % 3]), (data.test, list(range(0, 18, 3)))):
            for client in (0, 1):
                own = [i for i in rows if i // 9 == client]
                x, y = split.client(client)
                np.testing.assert_array_equal(x.numpy(), pixels[own].transpose(0, 3, 1, 2))
                assert y.tolist() == [i % 2 for i in own]
    assert coterie.load_clients(str(tmp_path / "image"), resize=4).shape == (3, 4, 4)
    with pytest.raises(CoterieError, match="--resize is for images, not for lists of numbers"):
        coterie.load_clients(str(tmp_path / "array"), resize=4)


def write_pfllib(folder: Path, num_classes: int = 4, **other: Any) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """As PFLlib's generators do: np.savez_compressed of a dictionary."""
    draw = np.random.default_rng(1)
    made = {}
    for split, n in (("train", 12), ("test", 4)):
        (folder / split).mkdir(parents=True)
        for client in range(11):
            content = {"x": draw.normal(size=(n, 1, 4, 4)).astype(np.float32), "y": draw.integers(0, 4, n), **other}
            with (folder / split / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data=np.array(content, dtype=object))
            made[f"{split}{client}"] = content
    (folder / "config.json").write_text(json.dumps({"num_clients": 11, "num_classes": num_classes}))
    return made


def test_pfllib_folders(tmp_path: Path) -> None:
    made = write_pfllib(tmp_path)
    data = coterie.load_clients(str(tmp_path))
    assert names(data) == [str(i) for i in range(11)]
    assert (data.classes, data.shape) == (4, (1, 4, 4))
    for client in range(11):
        for split, given in ((data.train, "train"), (data.test, "test")):
            x, y = split.client(client)
            np.testing.assert_array_equal(x.numpy(), made[f"{given}{client}"]["x"])
            np.testing.assert_array_equal(y.numpy(), made[f"{given}{client}"]["y"])


class Calls:
    def __reduce__(self) -> Any:
        return exec, ("import sys; sys.coterie_was_here = True",)


def test_pfllib_pickles_run_nothing(tmp_path: Path) -> None:
    write_pfllib(tmp_path, more=Calls())
    with pytest.raises(CoterieError, match=r"'builtins.exec' is not allowed"):
        coterie.load_clients(str(tmp_path))
    assert not hasattr(sys, "coterie_was_here")


class Pairs(Dataset[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


@pytest.mark.long
def test_torch_datasets(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (30, 1, 4, 4), np.uint8)
    y = np.arange(30) % 3
    parts = [slice(0, 12), slice(12, 30)]
    tensors = [TensorDataset(torch.from_numpy(x[p]), torch.from_numpy(y[p])) for p in parts]
    pairs = {f"client {i}": Pairs(list(x[p, 0]), y[p].tolist()) for i, p in enumerate(parts)}
    whole = Pairs(torch.from_numpy(x), torch.from_numpy(y))
    for data in (
        coterie.clients_from(tensors),
        coterie.clients_from(pairs, classes=("0", "1", "2"), input="image"),
        coterie.clients_from(whole, client=[0] * 12 + [1] * 18),
    ):
        assert (data.num_clients, data.shape, data.train.x.dtype) == (2, (1, 4, 4), torch.uint8)
        for client, p in enumerate(parts):
            assert held(data, client) == written(x[p], y[p])
    both = coterie.clients_from(tensors, tensors, validation=0.25)
    assert (both.test.sizes, both.train.sizes) == ((12, 18), (9, 14))
    result = coterie.run("fedper", both, "mlp", rounds=1)
    assert result.personal_model(1)(torch.from_numpy(x[:2])).shape == (2, 3)
    for wrong, told in (
        ((whole,), "list of Datasets"),
        (([whole, iter([])],), "with __len__ and __getitem__"),
        (([Pairs([np.zeros(2), np.zeros(3)], [0, 1])],), "sample 1: shape"),
        (([Pairs(np.zeros((4, 2)), [0, 1, -5, 1])],), "client 0, sample 2: -5"),
        (([Pairs(np.full((4, 2), np.nan), [0, 1, 0, 1])],), "missing values"),
    ):
        with pytest.raises(CoterieError, match=told):
            coterie.clients_from(*wrong)


# The split


def test_split_is_stratified_seeded_and_never_tears_copies_apart() -> None:
    draw = np.random.default_rng(0)
    for n in (1, 2, 3, 7, 40, 333):
        x, y = draw.normal(size=(n, 2)), draw.integers(0, 5, n)
        test = choose_test(y, digests(x), 0.25, 0, "a")
        assert test.sum() == int(n / 4 + 0.5)
        for k in range(5):
            assert abs(test[y == k].sum() - (y == k).sum() / 4) <= 1
        np.testing.assert_array_equal(test, choose_test(y, digests(x), 0.25, 0, "a"))
    assert (test != choose_test(y, digests(x), 0.25, 1, "a")).any()
    assert (test != choose_test(y, digests(x), 0.25, 0, "b")).any()
    assert not choose_test(np.array([0, 1]), digests(np.eye(2)), 0.99, 0, "a").all()
    copies = np.repeat(x, 3, axis=0)
    torn = choose_test(np.repeat(y, 3), digests(copies), 0.25, 0, "a").reshape(-1, 3)
    assert (torn.all(1) | ~torn.any(1)).all()


def test_split_of_a_client_depends_on_it_alone(tmp_path: Path) -> None:
    tables = numbers()
    for name, (x, y) in tables.items():
        write_csv(tmp_path / f"{name}.csv", x, y)
    before = coterie.load_clients(str(tmp_path))
    write_csv(tmp_path / "a new one.csv", *numbers(9)["b2"])
    after = coterie.load_clients(str(tmp_path))
    for name in tables:
        old, new = names(before).index(name), names(after).index(name)
        assert torch.equal(before.test.client(old)[0], after.test.client(new)[0])
    assert before.partition.settings["split"] == {"made": "per client and class", "share": 0.25, "seed": 0}
    other = coterie.load_clients(str(tmp_path), split_seed=1, test_share=0.5)
    assert sum(other.test.sizes) > sum(after.test.sizes)


# Statistics


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_normalise_auto(tmp_path: Path, kind: type) -> None:
    x = np.random.default_rng(0).integers(0, 256, (60, 3, 5, 5)).astype(kind)
    x[:, 1] = 7  # nothing varies
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(60) % 2, client=np.arange(60) // 20)
    data = coterie.load_clients(str(tmp_path / "a.npz"), normalise="auto")
    train = data.train.x.numpy().astype(np.float64) / (255 if kind is np.uint8 else 1)
    np.testing.assert_allclose(data.transform.mean, train.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(np.array(data.transform.std)[[0, 2]], train.std((0, 2, 3))[[0, 2]], rtol=1e-12)
    assert data.transform.std[1] == 1
    assert coterie.load_clients(str(tmp_path / "a.npz")).transform.mean == ()
    with pytest.raises(CoterieError, match="--normalise value"):
        coterie.load_clients(str(tmp_path / "a.npz"), normalise="yes")


def test_images_of_fractions_with_channels_last_are_left_alone_unless_they_are_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 6, 5, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2, client=np.arange(20) // 10)
    data = coterie.load_clients(str(tmp_path / "a.npz"))
    assert data.shape == (6, 5, 3)
    assert any("--input image" in line for line in describe_input(data))
    with pytest.raises(CoterieError, match=r"--channel-axis.*2 for 3 channels \(H, W, C\)"):
        coterie.load_clients(str(tmp_path / "a.npz"), normalise="auto")
    assert coterie.load_clients(str(tmp_path / "a.npz"), input="image", normalise="auto").shape == (3, 6, 5)
    np.savez(tmp_path / "b.npz", x=(x * 255).astype(np.uint8), y=np.arange(20) % 2, client=np.arange(20) // 10)
    moved = coterie.load_clients(str(tmp_path / "b.npz"))
    assert moved.shape == (3, 6, 5)
    assert any("channels last; read as 3 x 6 x 5" in line for line in describe_input(moved))


def test_columns_are_refused_where_there_are_none(tmp_path: Path) -> None:
    write_images(tmp_path / "images", split=False)
    write_pfllib(tmp_path / "pfllib")
    np.savez(tmp_path / "a.npz", x=np.eye(8), y=np.arange(8) % 2, client=np.arange(8) // 4)
    for name in ("images", "pfllib", "a.npz"):
        with pytest.raises(CoterieError, match="--group-column is for tables, not for"):
            coterie.load_clients(str(tmp_path / name), group_column="patient")
    with pytest.raises(CoterieError, match="--input is for your own data"):
        coterie.load_clients("fashion-mnist-small", input="image")


# What is wrong


def test_check_names_file_and_row(tmp_path: Path) -> None:
    good = numbers(rows=16)["b2"]
    write_csv(tmp_path / "good.csv", *good)
    lines = (tmp_path / "good.csv").read_text(encoding="utf-8").splitlines()
    bad = list(lines)
    bad[3] = "1,2,male,no"
    bad[5] = "1,,3,yes"
    bad[7] = "1,2,3,"
    bad[9] = "1,2"
    bad[11] = "inf,2,3,no"
    (tmp_path / "bad one.csv").write_text("\n".join(bad), encoding="utf-8")
    (tmp_path / "latin.csv").write_bytes("\n".join([*lines[:4], "1,2,3,Müll"]).encode("latin-1"))
    (tmp_path / "others.csv").write_text(
        "\n".join([lines[0].replace("column 1", "size"), *lines[1:]]), encoding="utf-8"
    )
    (tmp_path / "empty.csv").write_text(lines[0] + "\n", encoding="utf-8")
    (tmp_path / "nothing.csv").write_text("", encoding="utf-8")
    (tmp_path / "numbers.csv").write_text("1,2,3,0\n", encoding="utf-8")
    (tmp_path / "one class.csv").write_text("\n".join([lines[0], "1,2,3,no", "2,3,4,no"]), encoding="utf-8")
    found = problems(tmp_path)
    assert any(
        "bad one.csv, line 4, column 'column 2': 'male'" in e for e in found["text in a column of numbers"].examples
    )
    assert found["missing values"].count == 1
    told = found["missing values"].examples[0]
    assert "column 'column 1': 1 missing, the first in" in told
    assert told.endswith("bad one.csv, line 6")
    assert "bad one.csv, line 12, column 'column 0'" in found["infinite value"].examples[0]
    assert [e.split("/")[-1] for e in found["no label"].examples] == ["bad one.csv, line 8"]
    assert "bad one.csv, line 10: 2 values for 4 columns" in found["row of a different length"].examples[0]
    unread = "\n".join(found["cannot be read"].examples)
    for told in (
        "latin.csv: line 5 is not UTF-8",
        "others.csv: columns differ",
        "nothing.csv: the first line",
        "column names, not numbers",
    ):
        assert told in unread
    assert "(empty)" in found["client without training samples"].examples[0]
    assert "(one class)" in found["client with one class only"].examples[0]
    assert not found["client with one class only"].stops
    with pytest.raises(CoterieError, match=r"more kinds of problems.*coterie data check"):
        coterie.load_clients(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"y": np.array([0, 1, -1, 5] * 5)}, "label out of range"),
        ({"y": np.array([0, 0.5, np.nan, 1] * 5)}, "target that is missing or infinite"),
        ({"y": np.array([0, 1, np.nan, 1] * 5)}, "no label"),
        ({"y": np.array([0, 1, 2, 9] * 5), "classes": np.array(["a", "b", "c"])}, "label out of range"),
        ({"x": np.full((20, 2), np.nan)}, "missing values"),
        ({"x": np.full((20, 2, 3), np.nan)}, "missing value"),
    ],
)
def test_check_of_arrays(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    fine = {"x": np.random.default_rng(0).normal(size=(20, 2)), "y": np.arange(20) % 2, "client": np.arange(20) // 10}
    np.savez(tmp_path / "fine.npz", **fine)
    assert check(tmp_path / "fine.npz").fine
    np.savez(tmp_path / "wrong.npz", **fine | change)
    found = problems(tmp_path / "wrong.npz")
    assert found[told].stops
    assert f"{tmp_path}/wrong.npz, row " in found[told].examples[0]


def test_check_of_classes_nobody_has(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.eye(20), y=np.array([0, 3] * 10), client=np.arange(20) // 10)
    found = problems(tmp_path / "a.npz")
    assert found["class without samples"].examples == ["class 1 (1)", "class 2 (2)"]
    assert check(tmp_path / "a.npz").fine


def test_check_finds_test_samples_that_are_trained_on(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (30, 1, 4, 4), np.uint8)
    content = {"train_x": x[:20], "train_y": np.arange(20) % 2, "train_client": np.arange(20) % 4}
    own = {"test_x": x[18:], "test_y": np.arange(12) % 2, "test_client": np.arange(12) % 4}
    np.savez(tmp_path / "a.npz", **content, **own)
    found = problems(tmp_path / "a.npz")["test sample that equals a training sample"]
    assert (found.count, found.stops) == (2, False)  # a run accepts them
    coterie.run("local", coterie.load_clients(tmp_path / "a.npz"), "linear", rounds=1, progress=False)
    assert any("test split, row 0 is" in e and e.endswith("train split, row 18") for e in found.examples)
    np.savez(tmp_path / "b.npz", **content, **own | {"test_x": x[18:] // 2 + 100})
    assert "test sample that equals a training sample" not in problems(tmp_path / "b.npz")


def test_a_column_of_identifiers_is_one_problem(tmp_path: Path) -> None:
    """It does not move all test samples to training, and its codes are no values."""
    rows = [f"P{i:03},{i % 9},{'a' if i % 2 else 'b'}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["patient_id,score,label", *rows]) + "\n")
    found = check(tmp_path / "t.csv", Reading(client_column=""))
    assert [problem.what.split(",")[0] for problem in found.problems] == ["column with too many different texts"]
    assert (found.train, found.test) == (45, 15)
    assert (found.low, found.high) == (0, 8)


def test_check_of_images(tmp_path: Path) -> None:
    from PIL import Image

    write_images(tmp_path, split=False)
    (tmp_path / "client 9" / "cat" / "broken.png").write_bytes(b"\x89PNG nothing")
    (tmp_path / "client 9" / "cat" / "readme.txt").write_text("hello")
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "client 9" / "cat" / "large.png")
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(tmp_path / "client 9" / "cat" / "grey.png")
    (tmp_path / "nobody").mkdir()
    found = problems(tmp_path)
    assert "broken.png" in found["cannot be read"].examples[0]
    told = "\n".join(found["different shape than the rest"].examples)
    assert "large.png: 3 x 9 x 9 uint8, the first image has 3 x 5 x 4 uint8" in told
    assert "grey.png: 1 x 5 x 4" in told
    assert "readme.txt" in found["file without an image extension is ignored"].examples[0]
    assert "(nobody)" in found["client without training samples"].examples[0]


def test_check_of_pfllib(tmp_path: Path) -> None:
    write_pfllib(tmp_path, num_classes=3)
    (tmp_path / "train" / "5.npz").write_bytes(b"PK nothing")
    np.savez(tmp_path / "train" / "6.npz", data=np.array({"x": np.zeros((3, 9, 9)), "y": np.zeros(3)}, dtype=object))
    found = problems(tmp_path)
    assert {"label out of range", "different shape than the rest", "cannot be read"} <= set(found)
    assert "5.npz" in found["cannot be read"].examples[0]
    assert "6.npz, row 0" in found["different shape than the rest"].examples[0]


def hostile(folder: Path) -> dict[str, Callable[[Path], object]]:
    def pickled(path: Path) -> None:
        np.savez(path, x=np.array([{}, {}], dtype=object), y=np.zeros(2), client=np.zeros(2))

    def bomb(path: Path) -> None:  # 64 GiB of zeros, says the header of an array that is not there
        import zipfile

        header = (
            b"\x93NUMPY\x01\x00v\x00"
            + b"{'descr': '|u1', 'fortran_order': False, 'shape': (68719476736,), }".ljust(117)
        )
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header + b"\n" + b"0" * 10)

    return {
        "pickled.npz": pickled,
        "bomb.npz": bomb,
        "text.npz": lambda p: p.write_text("hello"),
        "empty.npz": lambda p: p.write_bytes(b""),
        "empty.csv": lambda p: p.write_bytes(b""),
        "zeros.csv": lambda p: p.write_bytes(b"\0" * 1000),
        "quote.csv": lambda p: p.write_text('a,client,label\n"' + "x" * 300_000),
        "text.parquet": lambda p: p.write_text("hello"),
        "short.npz": lambda p: np.savez(p, x=np.zeros((5, 2)), y=np.zeros(4), client=np.zeros(5)),
        "no client.npz": lambda p: np.savez(p, x=np.zeros((5, 2)), y=np.zeros(5)),
        "words.npz": lambda p: np.savez(p, x=np.array([["a"]] * 5), y=np.zeros(5), client=np.zeros(5)),
        "many.npz": lambda p: np.savez(p, x=np.zeros((5, 2)), y=np.arange(5) * 10**12, client=np.zeros(5)),
        "header.csv": lambda p: p.write_text("a,client,label\n"),
        "unlabelled.npz": lambda p: np.savez(p, x=np.zeros((5, 2)), y=np.full(5, np.nan), client=np.zeros(5)),
        "gaps.csv": lambda p: p.write_text("a,client,y\n" + "".join(f"{i},c,{i}.5\n" for i in range(9)) + "9,c,\n"),
        "texts.csv": lambda p: p.write_text("a,client,y\n" + "".join(f"{i},c,t{i}\n" for i in range(10_001))),
        "esc\x1b[31m.bin": lambda p: p.write_bytes(b"x"),
        "other.bin": lambda p: p.write_bytes(b"hello"),
        "folder": lambda p: p.mkdir(),
        "missing": lambda p: None,
        "files": lambda p: (p.mkdir(), (p / "a.txt").write_text("x")),
        "json": lambda p: (p.mkdir(), (p / "state.json").write_text("[" * 100_000)),
        "arrow": lambda p: (
            p.mkdir(),
            (p / "state.json").write_text('{"_data_files": [{"filename": "../../x"}]}'),
            (p / "dataset_info.json").write_text("{}"),
        ),
    }


@pytest.mark.parametrize("name", list(hostile(Path())))
def test_bad_input_is_told_in_a_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    hostile(tmp_path)[name](path)
    with pytest.raises(SystemExit) as stopped:
        main(["data", "check", str(path)])
    assert stopped.value.code == 1
    assert str(path).replace("\x1b", "\\u001b") in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["run", "fedavg", "--dataset", str(path)])
    assert stopped.value.code == 2
    assert str(path).replace("\x1b", "\\u001b") in capsys.readouterr().err


def test_missing_readers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images", split=False)
    (tmp_path / "a.parquet").write_bytes(b"x")
    (tmp_path / "arrow").mkdir()
    (tmp_path / "arrow" / "state.json").write_text("{}")
    (tmp_path / "arrow" / "dataset_info.json").write_text("{}")
    for module in ("PIL", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    for path, extra in (("images", "images"), ("a.parquet", "parquet"), ("arrow", "datasets")):
        with pytest.raises(CoterieError, match=rf"pip install 'coterie\[{extra}\]'"):
            coterie.load_clients(str(tmp_path / path))


# The command line


def test_check_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (x, y) in numbers().items():
        write_csv(tmp_path / f"{name}.csv", x, y)
    with pytest.raises(SystemExit) as stopped:
        main(["data", "check", str(tmp_path)])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for told in ("3 clients", "39 samples", "2 classes: no 19, yes 20", "float32", "Zürich Süd |", "No errors found."):
        assert told in text
    with pytest.raises(SystemExit):
        main(["data", "check", str(tmp_path), "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["fine"]
    assert sum(map(sum, content["counts"])) == 39
    assert content["shape"] == [3]
    assert [(p["what"].split(";")[0], p["stops"]) for p in content["problems"]] == [
        ("values far from 0 are hard to learn from", False)
    ]


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("Heart Disease", "wards.v2"):
        for name, (x, y) in numbers().items():
            write_csv(tmp_path / folder / f"{name}.csv", x, y)
    assert coterie.load_clients("Heart Disease").num_clients == 4  # a known name comes first
    own = coterie.load_clients("./Heart Disease")
    assert (own.num_clients, own.name) == (3, "own-Heart Disease")  # never mistaken for the known one later
    assert coterie.load_clients("wards.v2").name == "wards.v2"
    with pytest.raises(CoterieError, match="did you mean 'heart-disease'"):
        coterie.load_clients("hart-disease")
    with pytest.raises(CoterieError, match="no such file or folder"):
        coterie.load_clients("./hart-disease")


@pytest.mark.long
def test_ten_thousand_clients_take_seconds(tmp_path: Path) -> None:
    rows = "".join(f"{i % 7},{i % 5},{i % 3}\n" for i in range(10))
    for client in range(10_000):
        (tmp_path / f"{client}.csv").write_text(f"a,b,label\n{client},0,1\n{rows}")
    start = time.process_time()
    assert len(check(tmp_path).clients) == 10_000
    data = coterie.load_clients(str(tmp_path))
    assert (data.num_clients, sum(data.train.sizes) + sum(data.test.sizes)) == (10_000, 110_000)
    assert time.process_time() - start < 20  # measured: 4


# A model of one's own


NET = '''
from torch import nn

class Net(nn.Module):
    """The head is in the middle of the names, so it must be named."""
    def __init__(self, shape, classes):
        super().__init__()
        self.top = nn.Linear(6, classes)
        self.body = nn.Sequential(nn.Linear(shape[0], 6), nn.ReLU())

    def forward(self, x):
        return self.top(self.body(x))

class Chain(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Linear(shape[0], 6), nn.ReLU(), nn.Linear(6, classes))
'''


def test_own_model_with_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my net").mkdir()
    (tmp_path / "mynet_of_this_test.py").write_text(NET)
    for name, (x, y) in numbers().items():
        write_csv(tmp_path / "data" / f"{name}.csv", x, y)
    common = ["run", "fedper", "--dataset", "data", "--rounds", "1", "--normalise", "auto"]
    main([*common, "--model", "mynet_of_this_test:Net", "--head", "top", "--out", "named"])
    main([*common, "--model", "mynet_of_this_test:Chain", "--out", "found"])
    for run in ("named", "found"):
        config = json.loads((tmp_path / run / "config.json").read_text(encoding="utf-8"))
        assert config["model"]["head"] == "Linear(in_features=6, out_features=2, bias=True)"
        assert config["data"]["client_names"][-1] in numbers()
        assert len(config["data"]["transform"]["mean"]) == 3
    with pytest.raises(SystemExit):
        main([*common, "--model", "mynet_of_this_test:Net", "--head", "nothing", "--out", "wrong"])


def test_a_path_object_is_a_path_and_never_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i},{'ab'[i % 2]},{i % 3}\n" for i in range(24))
    Path("table.csv").write_text(f"age,label,client\n{rows}", encoding="utf-8")
    by_path, by_name = coterie.load_clients(Path("table.csv")), coterie.load_clients("./table.csv")
    assert by_path.name == by_name.name == "table"
    assert by_path.train.x.tolist() == by_name.train.x.tolist()
    assert coterie.load_clients(tmp_path / "table.csv").train.sizes == by_path.train.sizes
    with pytest.raises(CoterieError, match="heart-disease: no such file or folder"):
        coterie.load_clients(Path("heart-disease"))
