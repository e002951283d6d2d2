from __future__ import annotations

import gzip
import lzma
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.core.preprocess import Preprocess
from coterie.core.task import Task
from coterie.data import DATASETS, Dataset, datasets, divide, federate, load, transform
from coterie.data.datasets import SHIPPED
from coterie.data.packed import pack, unpack
from coterie.data.presidents import read_presidents

DRAW = np.random.default_rng(5)


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, names: tuple[str, str], suffix: str, classes: int = 10) -> dict[str, Any]:
    written = {}
    for split, count in zip(names, (12, 6), strict=True):
        x = DRAW.integers(0, 256, (count, 28, 28), np.uint8)
        y = (np.arange(count) * 5 % classes).astype(np.uint8)
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", x)
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", y)
        written[split] = (x, y)
    return written


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "DEBIAN_FASHION", tmp_path / "debian")
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("own_folder", [True, False])
def test_mnist_and_fashion_mnist(tmp_path: Path, name: str, suffix: str, own_folder: bool) -> None:
    raw = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}[name] if own_folder else ""
    written = write_mnist(tmp_path / raw, ("train", "t10k"), suffix)
    read = load(name, tmp_path)
    np.testing.assert_array_equal(read.x_train[:, 0], written["train"][0])
    np.testing.assert_array_equal(read.y_test, written["t10k"][1])
    assert (read.x_train.dtype, read.y_train.dtype, read.name) == (torch.uint8, torch.int64, name)


def test_emnist_is_turned_upright(tmp_path: Path) -> None:
    written = write_mnist(tmp_path / "EMNIST/raw", ("emnist-byclass-train", "emnist-byclass-test"), ".gz", 62)
    read = load("EMNIST", tmp_path)
    np.testing.assert_array_equal(read.x_train[:, 0], written["emnist-byclass-train"][0].transpose(0, 2, 1))
    assert read.x_test.is_contiguous()
    assert [read.classes[i] for i in (0, 9, 10, 35, 36, 61)] == list("09AZaz")


def write_cifar(path: Path, labels: bytes, count: int, classes: int) -> tuple[Any, list[int]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = DRAW.integers(0, 256, (count, 3072), np.uint8), DRAW.integers(0, classes, count).tolist()
    path.write_bytes(pickle.dumps({b"data": x, labels: y, b"batch_label": b"a batch"}, 2))
    return x, y


@pytest.mark.parametrize("folder", ["cifar-10-batches-py", ""])
def test_cifar10(tmp_path: Path, folder: str) -> None:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    written = [write_cifar(tmp_path / folder / name, b"labels", 4, 10) for name in names]
    read = load("CIFAR-10", tmp_path)
    np.testing.assert_array_equal(read.x_train.reshape(20, -1), np.concatenate([x for x, _ in written[:5]]))
    assert read.y_train.tolist() == [label for _, y in written[:5] for label in y]
    assert read.y_test.tolist() == written[5][1]
    assert read.x_test.shape == (4, 3, 32, 32)


def test_cifar100(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    x, y = write_cifar(folder / "train", b"fine_labels", 9, 100)
    write_cifar(folder / "test", b"fine_labels", 3, 100)
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"c%d" % i for i in range(100)]}, 2))
    read = load("cifar100", tmp_path)
    np.testing.assert_array_equal(read.x_train.reshape(9, -1), x)
    assert (read.y_train.tolist(), read.classes[99]) == (y, "c99")


def test_cinic10(tmp_path: Path) -> None:
    from PIL import Image

    pixels = DRAW.integers(0, 256, (32, 32, 3), np.uint8)
    for split in ("train", "valid", "test"):
        for name in ("ship", "bird"):
            (tmp_path / "CINIC-10" / split / name).mkdir(parents=True)
            Image.fromarray(pixels).save(tmp_path / "CINIC-10" / split / name / "a.png")
    read = load("CINIC-10", tmp_path)
    assert (read.classes, read.y_train.tolist(), len(read.y_test)) == (("bird", "ship"), [0, 1], 2)
    np.testing.assert_array_equal(read.x_train[0], pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("alias", ["fmnist", "FashionMNIST", "fashion_mnist", "Fashion-MNIST"])
def test_aliases(tmp_path: Path, alias: str) -> None:
    write_mnist(tmp_path / "FashionMNIST/raw", ("train", "t10k"), "")
    assert load(alias, tmp_path).name == "fashion-mnist"


def test_unknown_dataset() -> None:
    with pytest.raises(CoterieError, match="did you mean 'cifar10'"):
        load("cifar11")


@pytest.mark.parametrize("name", [name for name, source in DATASETS.items() if source.files])
def test_missing_dataset_tells_what_where_and_how(tmp_path: Path, name: str) -> None:
    with pytest.raises(CoterieError) as caught:
        load(name, tmp_path)
    for part in (name, "Needed:", str(tmp_path), DATASETS[name].origin, "COTERIE_DATA"):
        assert part in str(caught.value)


def test_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "home/.cache/coterie/MNIST/raw", ("train", "t10k"), "")
    assert len(load("mnist").y_train) == 12
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(CoterieError, match="elsewhere"):
        load("mnist")
    write_mnist(tmp_path / "debian", ("train", "t10k"), ".gz")
    assert len(load("fashion-mnist").y_train) == 12


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(CoterieError, match="no home directory"):
        load("mnist")
    assert len(load("heart-disease").y_train) == 693


def test_files_of_the_other_dataset_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, ("train", "t10k"), "")
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.array([9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9], np.uint8))
    assert load("fashion-mnist", tmp_path)
    with pytest.raises(CoterieError, match="these files are fashion-mnist, not mnist"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("labels", [[0] * 11, [10] * 12])
def test_labels_that_do_not_fit(tmp_path: Path, labels: list[int]) -> None:
    write_mnist(tmp_path, ("train", "t10k"), "")
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.array(labels, np.uint8))
    with pytest.raises(CoterieError, match=r"train-images-idx3-ubyte|but there are 10 classes"):
        load("mnist", tmp_path)


def test_transforms() -> None:
    assert transform("emnist").mean == (0.1307,)
    assert transform("cifar10").crop == 4
    assert transform("cifar10", "crc").std == (0.229, 0.224, 0.225)
    assert transform("cinic10", "akd").mean == (0.5, 0.5, 0.5)
    assert not transform("cifar100", "reg").flip
    assert transform("heart-disease", "reg").mean == ()
    with pytest.raises(CoterieError, match="unknown protocol"):
        transform("mnist", "pca")


def test_pack_is_lossless(tmp_path: Path) -> None:
    x = DRAW.integers(0, 256, (9, 5, 7), np.uint8) * (DRAW.random((9, 5, 7)) > 0.5).astype(np.uint8)
    y = np.arange(9, dtype=np.uint8)
    (tmp_path / "some.xz").write_bytes(pack(x, y))
    for read, written in zip(unpack(tmp_path / "some.xz"), (x, y), strict=True):
        np.testing.assert_array_equal(read, written)
    for damaged in (pack(x, y)[:-7], b"", b"nothing"):
        (tmp_path / "some.xz").write_bytes(damaged)
        with pytest.raises(CoterieError, match=r"some\.xz: damaged"):
            unpack(tmp_path / "some.xz")


def test_shipped_fashion_mnist() -> None:
    small = load("fashion-mnist-small")
    assert small.x_train.shape == (9000, 1, 28, 28)
    assert torch.bincount(small.y_train).tolist() == [900] * 10
    assert torch.bincount(small.y_test).tolist() == [225] * 10
    size = sum(file.stat().st_size for file in datasets.SHIPPED.glob("fashion*.xz"))
    assert size <= 3_900_000
    # the mean pixel of all of Fashion-MNIST is 72.9 (0.286 of 255)
    assert abs(small.x_train.float().mean() - 72.9) < 1


def test_shipped_heart_disease() -> None:
    heart = load("heart-disease")
    assert heart.owners is not None
    assert torch.bincount(torch.cat(heart.owners)).tolist() == [303, 294, 123, 200]  # as UCI publishes
    assert torch.bincount(torch.cat([heart.y_train, heart.y_test])).tolist() == [411, 509]
    assert heart.client_names == ("cleveland", "hungarian", "switzerland", "long-beach")
    inputs, tested = (Preprocess(heart.transform)(x) for x in (heart.x_train, heart.x_test))
    assert inputs.isfinite().all()
    assert tested.isfinite().all()
    torch.testing.assert_close(inputs.mean(0), torch.zeros(24), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std(0, correction=0), torch.ones(24))
    for hospital in range(4):
        own = [y[owner == hospital] for y, owner in zip((heart.y_train, heart.y_test), heart.owners, strict=True)]
        assert 0.23 < len(own[1]) / (len(own[0]) + len(own[1])) < 0.26
        assert abs(own[0].double().mean() - own[1].double().mean()) < 0.03


def heart_file() -> tuple[dict[str, Any], Any, Any]:
    """Columns by name, grades and hospitals, as in the file."""
    with np.load(SHIPPED / "heart_disease.npz") as file:
        columns = dict(zip(map(str, file["columns"][:-1]), file["x"].T, strict=True))
        return columns, file["y"], file["hospital"]


def test_heart_grades_are_the_diagnoses() -> None:
    grades = load("heart-grades")
    everyone = torch.cat([grades.y_train, grades.y_test])
    assert torch.bincount(everyone).tolist() == [411, 265, 109, 107, 28]  # as UCI publishes
    assert grades.classes == ("none", "grade 1", "grade 2", "grade 3", "grade 4")
    _, grade, hospital = heart_file()
    assert grades.owners is not None
    for h in range(4):
        for g in range(5):
            own = int(((hospital == h) & (grade == g)).sum())
            assert int(((grades.owners[1] == h) & (grades.y_test == g)).sum()) == own // 4


def test_heart_findings_are_labels_and_no_inputs() -> None:
    found = load("heart-findings")
    assert found.task.name == "multi-label"
    columns, grade, hospital = heart_file()
    sources = [columns[name] for name in ("exang", "restecg", "trestbps", "oldpeak")]
    known = ~np.isnan(np.stack(sources)).any(0) & (columns["trestbps"] > 0)
    exang, ecg, pressure, depression = (values[known] for values in sources)
    expected = [grade[known] > 0, exang == 1, ecg > 0, pressure >= 140, depression >= 1]
    assert len(found.y_train) + len(found.y_test) == known.sum() == 851
    counted = torch.cat([found.y_train, found.y_test]).sum(0).tolist()
    assert counted == [int(label.sum()) for label in expected]
    assert not {column.name for column in found.transform.columns} & {"exang", "restecg", "trestbps", "oldpeak"}
    assert np.bincount(hospital[known]).tolist() == torch.bincount(torch.cat(found.owners or ())).tolist()


def test_heart_rate_is_a_regression() -> None:
    rate = load("heart-rate")
    columns, _, _ = heart_file()
    known = columns["thalach"][~np.isnan(columns["thalach"])]
    assert sorted(torch.cat([rate.y_train, rate.y_test])[:, 0].tolist()) == sorted(known.tolist())
    assert rate.task.name == "regression"
    assert isinstance(rate.task, Task)
    assert rate.task.options["mean"] == pytest.approx([float(rate.y_train.mean())])
    assert "thalach" not in [column.name for column in rate.transform.columns]
    assert rate.client_names == ("cleveland", "hungarian", "switzerland", "long-beach")


def test_presidents_never_overlap() -> None:
    text = load("presidents")
    assert text.owners is not None
    assert (len(text.client_names), text.classes[0], text.task.classes) == (43, " ", len(text.classes))
    assert text.x_train.shape == text.y_train.shape == (43 * 199, 80)
    assert text.x_test.shape == (43 * 49, 80)
    assert text.client_names[0] == "George Washington"
    assert "".join(text.classes[i] for i in text.x_train[0, :15].tolist()) == "Fellow-Citizens"
    assert torch.equal(text.x_train[:, 1:], text.y_train[:, :-1])
    for x, y, owner in (
        (text.x_train, text.y_train, text.owners[0]),
        (text.x_test, text.y_test, text.owners[1]),
    ):
        follows = owner[1:] == owner[:-1]
        assert torch.equal(y[:-1, -1][follows], x[1:, 0][follows])  # windows are consecutive
    train = {tuple(row) for row in text.x_train.tolist()}
    assert not train & {tuple(row) for row in text.x_test.tolist()}
    assert (SHIPPED / "presidents.xz").stat().st_size <= 300_000


def test_a_damaged_file_of_presidents(tmp_path: Path) -> None:
    content = (SHIPPED / "presidents.xz").read_bytes()
    for damaged in (content[:-9], b"", lzma.compress(b"{}"), lzma.compress(b'{"vocabulary": "ab", "presidents": 3}')):
        (tmp_path / "presidents.xz").write_bytes(damaged)
        with pytest.raises(CoterieError, match=r"presidents\.xz: damaged; install Coterie again"):
            read_presidents(tmp_path, {})


@pytest.mark.parametrize("name", ["heart-grades", "heart-findings", "heart-rate", "presidents"])
def test_other_tasks_are_federated_by_their_clients(name: str) -> None:
    source = load(name)
    data = federate(source, divide(source, "natural"))
    assert data.task.name == source.task.name
    assert bool(data.classes) == data.task.one_class
    assert data.client_names == source.client_names
    assert data.class_names == source.classes
    if not data.task.one_class:
        shared = federate(source, divide(source, "iid", num_clients=3))
        assert (shared.num_clients, shared.client_names) == (3, ())
        with pytest.raises(CoterieError, match=f"'dirichlet' divides samples by class, which {name}"):
            divide(source, "dirichlet")


def test_heart_disease_in_clinical_units_gives_the_standardised_inputs_of_its_recipe() -> None:
    """Recomputed from the file, column by column, as the module's description says."""
    with np.load(SHIPPED / "heart_disease.npz") as file:
        raw, disease, hospital = file["x"], file["y"] > 0, file["hospital"]
        names = [str(name) for name in file["columns"][:-1]]
    test = np.zeros(920, bool)
    for stratum in {(h, d) for h, d in zip(hospital.tolist(), disease.tolist(), strict=True)}:
        test[np.flatnonzero((hospital == stratum[0]) & (disease == stratum[1]))[3::4]] = True
    for name in ("trestbps", "chol"):
        raw[raw[:, names.index(name)] == 0, names.index(name)] = np.nan
    made = []
    for name, values in zip(names, raw.T, strict=True):
        gaps, known = np.isnan(values), values[~test][~np.isnan(values[~test])]
        options, counts = np.unique(known, return_counts=True)
        measured = name in ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")
        full = np.where(gaps, np.median(known) if measured else options[counts.argmax()], values)
        made += [full == option for option in options] if name in ("cp", "restecg", "thal") else [full]
        made += [gaps] if gaps[~test].mean() > 0.1 else []
    table = np.stack(made, axis=1).astype(np.float32)
    expected = (table - table[~test].mean(0)) / table[~test].std(0)
    heart = load("heart-disease")
    for x, own in ((heart.x_train, ~test), (heart.x_test, test)):
        got = Preprocess(heart.transform)(x).numpy()
        np.testing.assert_allclose(got, expected[own], atol=1e-6)
    ages = heart.x_train[:, [column.name for column in heart.transform.columns].index("age")]
    assert (ages.min(), ages.max()) == (28, 77)  # years


def test_dataset_checks_itself(tiny: Dataset) -> None:
    with pytest.raises(CoterieError, match="39 train labels"):
        Dataset("tiny", tiny.x_train, tiny.y_train[1:], tiny.x_test, tiny.y_test, tiny.classes)
