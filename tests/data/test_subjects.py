"""UCI HAR and PAMAP2 in their publishers' formats, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.core.preprocess import Preprocess
from coterie.data import divide, federate, load
from coterie.data.sensors import SENSED, SIGNALS

DRAW = np.random.default_rng(4)


def write_har(root: Path, counts: dict[int, int] | None = None) -> dict[str, Any]:
    """Subjects 1 and 3 in train, 2 in test, with windows of two of three activities."""
    folder = root / "UCI HAR Dataset"
    folder.mkdir(parents=True)
    (folder / "activity_labels.txt").write_text("1 WALKING\n2 WALKING_UPSTAIRS\n3 SITTING\n", encoding="utf-8")
    written = {}
    for split, subjects in (("train", (1, 3)), ("test", (2,))):
        own = folder / split
        (own / "Inertial Signals").mkdir(parents=True)
        subject = np.repeat(subjects, 12)
        y = np.tile(np.repeat([1, 3], [8, 4]), len(subjects))
        x = DRAW.normal(size=(len(y), 9, 128))
        features = DRAW.uniform(-1, 1, (len(y), 561))
        np.savetxt(own / f"y_{split}.txt", y, fmt="%d")
        np.savetxt(own / f"subject_{split}.txt", subject, fmt="%d")
        np.savetxt(own / f"X_{split}.txt", features, fmt=" %.7e")
        for name, signal in zip(SIGNALS, x.transpose(1, 0, 2), strict=True):
            np.savetxt(own / "Inertial Signals" / f"{name}_{split}.txt", signal, fmt=" %.7e")
        written[split] = x, features
    return written


def test_har_by_subject(tmp_path: Path) -> None:
    written = write_har(tmp_path)
    source = load("uci-har", tmp_path)
    data = federate(source, divide(source, "natural"))
    assert data.client_names == ("subject 1", "subject 2", "subject 3")
    assert data.class_names == ("walking", "walking upstairs", "sitting")
    # of 8 windows: 5 train, 1 left out, 2 test; of 4: 2 train, 1 left out, 1 test
    assert (data.train.sizes, data.test.sizes) == ((7, 7, 7), (3, 3, 3))
    x, y = data.train.client(0)
    np.testing.assert_allclose(x, written["train"][0][[0, 1, 2, 3, 4, 8, 9]], rtol=1e-6)
    assert y.tolist() == [0, 0, 0, 0, 0, 2, 2]
    np.testing.assert_allclose(data.test.client(1)[0], written["test"][0][[6, 7, 11]], rtol=1e-6)
    inputs = Preprocess(data.transform)(data.train.x)
    torch.testing.assert_close(inputs.mean((0, 2)), torch.zeros(9), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2), correction=0), torch.ones(9), atol=1e-5, rtol=0)


def test_har_features(tmp_path: Path) -> None:
    written = write_har(tmp_path)
    source = load("uci-har-features", tmp_path)
    assert source.x_train.shape == (21, 561)
    np.testing.assert_allclose(source.x_train[0], written["train"][1][0], rtol=1e-6)


def test_damaged_har(tmp_path: Path) -> None:
    write_har(tmp_path)
    folder = tmp_path / "UCI HAR Dataset"
    signal = folder / "train/Inertial Signals/body_gyro_y_train.txt"
    for path, change, says in (
        (signal, lambda text: text[: len(text) // 2], "cannot be read as a table|expected 128 in a row|of different"),
        (signal, lambda text: "\n".join(text.splitlines()[1:]), "files of different lengths"),
        (signal, lambda text: text.replace("e-01", "e-0x", 1), "cannot be read as a table of numbers"),
        (signal, lambda text: " nan" + text[text.index("e") + 4 :], "row 0 has a value that is not finite"),
        (folder / "train/y_train.txt", lambda text: text.replace("3", "4"), "activities are 1 to 3, got 1 to 4"),
        (folder / "train/y_train.txt", lambda text: text + "1\n", "24 windows, 25 activities and 24 subjects"),
        (folder / "train/subject_train.txt", lambda text: "1.5\n" + text[2:], "row 0 is not a whole number"),
        (folder / "activity_labels.txt", lambda text: text.replace("2 ", "5 "), "numbered from 1"),
    ):
        whole = path.read_text(encoding="utf-8")
        path.write_text(change(whole), encoding="utf-8")
        with pytest.raises(CoterieError, match=says):
            load("uci-har", tmp_path)
        path.write_text(whole, encoding="utf-8")
    signal.unlink()
    with pytest.raises(CoterieError, match=r"body_gyro_y_train\.txt: cannot be read"):
        load("uci-har", tmp_path)


def write_pamap(path: Path, runs: list[tuple[int, int]]) -> Any:
    """Runs of (activity, readings) at 100 Hz, in 54 columns; the heart rate is missing in most rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sum(n for _, n in runs)
    table = DRAW.normal(size=(rows, 54)).round(5)
    table[:, 0] = np.arange(rows) / 100
    table[:, 1] = np.repeat([activity for activity, _ in runs], [n for _, n in runs])
    table[:, 2] = np.where(np.arange(rows) % 11, np.nan, 100)
    np.savetxt(path, table, fmt="%.6g")
    return table


def test_pamap2_by_subject(tmp_path: Path) -> None:
    protocol = tmp_path / "PAMAP2_Dataset/Protocol"
    first = write_pamap(protocol / "subject101.dat", [(0, 100), (1, 4 * 512 + 100), (0, 30), (24, 600)])
    write_pamap(protocol / "subject102.dat", [(17, 512), (4, 500)])
    source = load("pamap2", tmp_path)
    data = federate(source, divide(source, "natural"))
    assert data.client_names == ("subject 101", "subject 102")
    assert (data.train.sizes, data.test.sizes) == ((4, 1), (1, 0))  # the last of four windows of lying
    assert [data.class_names[i] for i in data.train.client(0)[1].tolist()] == ["lying"] * 3 + ["rope jumping"]
    assert data.class_names[data.train.client(1)[1][0]] == "ironing"
    np.testing.assert_allclose(data.train.client(0)[0][1], first[612:1124:4, SENSED].T, rtol=1e-4, atol=1e-5)
    assert [SENSED[i] for i in (0, 3, 6, 9, 26)] == [4, 10, 13, 21, 49]  # hand acc16 x, gyro x, field x; chest; ankle


def test_gaps_of_pamap2(tmp_path: Path) -> None:
    """A short gap is interpolated; a window that lacks most of a signal is left out."""
    path = tmp_path / "Protocol/subject101.dat"
    table = write_pamap(path, [(5, 1024)])
    table[100:103, 4] = np.nan
    table[600:1000, 21] = np.nan
    table[:2, 45] = np.nan
    np.savetxt(path, table, fmt="%.6g")
    source = load("pamap2", tmp_path)
    assert len(source.x_train) == 1
    assert source.x_train.isfinite().all()
    filled = np.interp(100, [99, 103], table[[99, 103], 4])
    assert float(source.x_train[0, 0, 25]) == pytest.approx(filled, abs=1e-4)
    assert float(source.x_train[0, SENSED.index(45), 0]) == pytest.approx(table[2, 45], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "\n".join(line.rpartition(" ")[0] for line in text.splitlines()), "of 53 numbers, expected 54"),
        (lambda text: text[:-40], "cannot be read as a table of numbers"),
        (lambda text: text.replace("nan", "?", 1), "cannot be read as a table of numbers"),
        (lambda text: text.replace(" 5 ", " 9 "), "activity 9 is not one of the protocol's"),
        (lambda text: "\n".join(text.splitlines()[:511]), "no window of 512 readings"),
    ],
)
def test_damaged_pamap2(tmp_path: Path, change: Any, says: str) -> None:
    path = tmp_path / "Protocol/subject101.dat"
    write_pamap(path, [(5, 512)])
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(CoterieError, match=says):
        load("pamap2", tmp_path)
    path.unlink()
    with pytest.raises(CoterieError, match=r"no files subject101\.dat"):
        load("pamap2", tmp_path)
