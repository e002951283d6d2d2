"""Datasets of several domains in their publishers' formats, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.data import divide, federate, load
from coterie.data.domains import DOMAINNET, OFFICE_31, PACS

Image = pytest.importorskip("PIL.Image")
DRAW = np.random.default_rng(6)


def write_image(path: Path, height: int = 30, width: int = 50, color: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (
        DRAW.integers(0, 256, (height, width, 3), np.uint8) if color is None else np.full((height, width, 3), color)
    )
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def write_pacs(root: Path) -> None:
    for number, domain in enumerate(PACS):
        for label in ("dog", "house"):
            for i in range(5):
                write_image(root / domain / label / f"pic_{i:03}.png", color=10 * number + i)


def test_pacs_has_a_client_for_each_domain(tmp_path: Path) -> None:
    write_pacs(tmp_path / "PACS")
    source = load("pacs", tmp_path, resize=8)
    data = federate(source, divide(source, "natural"))
    assert data.client_names == PACS
    assert data.class_names == ("dog", "house")
    assert (data.shape, data.train.sizes, data.test.sizes) == ((3, 8, 8), (8,) * 4, (2,) * 4)
    x, y = data.test.client(2)
    assert (x[:, 0, 0, 0].tolist(), y.tolist()) == ([23, 23], [0, 1])  # the fourth image of each class
    assert load("pacs", tmp_path).x_train.shape[1:] == (3, 64, 64)


def test_resizing_keeps_the_center(tmp_path: Path) -> None:
    """An image of 4 x 8 pixels: its four middle columns are kept as they are."""
    for domain in PACS:
        write_image(tmp_path / domain / "dog" / "a.png", 4, 8)
    pixels = np.asarray(Image.open(tmp_path / "photo" / "dog" / "a.png"))
    source = load("pacs", tmp_path, resize=4)
    np.testing.assert_array_equal(source.x_train[2], pixels[:, 2:6].transpose(2, 0, 1))
    halved = load("pacs", tmp_path, resize=2).x_train[2].numpy()
    block = pixels[:, 2:6].astype(float).reshape(2, 2, 2, 2, 3).mean((1, 3)).transpose(2, 0, 1)
    assert np.abs(halved - block).mean() < 25  # Pillow's filter is wider than the mean of four pixels


def test_resize_is_for_images_of_different_sizes(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="heart-disease has samples of one shape; resize is for pacs"):
        load("heart-disease", tmp_path, resize=8)
    write_pacs(tmp_path)
    with pytest.raises(CoterieError, match="resize must be at least 1, got 0"):
        load("pacs", tmp_path, resize=0)


def test_office_has_a_folder_more(tmp_path: Path) -> None:
    for domain in OFFICE_31:
        for i in range(4):
            write_image(tmp_path / "office31" / domain / "images" / "mug" / f"frame_{i:04}.jpg")
    source = load("office31", tmp_path)
    assert (source.classes, len(source.y_train), len(source.y_test)) == (("mug",), 9, 3)
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        write_image(tmp_path / "office-caltech" / domain / "mug" / "frame_0001.jpg")
    assert len(load("office-caltech", tmp_path).y_train) == 4


def write_domainnet(root: Path) -> None:
    for domain in DOMAINNET:
        lists: dict[str, list[str]] = {"train": [], "test": []}
        for label, name in enumerate(("axe", "zebra")):
            for i in range(3):
                place = f"{domain}/{name}/{domain}_{label:03}_{i:06}.jpg"
                write_image(root / place)
                lists["test" if i == 0 else "train"].append(f"{place} {label}")
        for split, lines in lists.items():
            (root / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_domainnet_uses_its_lists(tmp_path: Path) -> None:
    write_domainnet(tmp_path)
    source = load("domainnet", tmp_path, resize=8)
    data = federate(source, divide(source, "natural"))
    assert (data.train.sizes, data.test.sizes) == ((4,) * 6, (2,) * 6)
    assert data.test.client(0)[1].tolist() == [0, 1]
    for line in ("clipart/axe/../../secret.jpg 0", "real/axe/real_000_000001.jpg 0", "clipart/owl/a.jpg 1", "clipart"):
        (tmp_path / "clipart_train.txt").write_text(line, encoding="utf-8")
        with pytest.raises(CoterieError, match=r"clipart_train\.txt, line 1: expected 'clipart/CLASS/FILE NUMBER'"):
            load("domainnet", tmp_path)
    (tmp_path / "clipart_train.txt").write_text("clipart/axe/gone.jpg 0", encoding="utf-8")
    with pytest.raises(CoterieError, match=r"gone\.jpg: cannot be read as an image"):
        load("domainnet", tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    write_pacs(tmp_path)
    path = tmp_path / "sketch/house/pic_002.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CoterieError, match=r"pic_002\.png: cannot be read as an image"):
        load("pacs", tmp_path)
    for picture in path.parent.iterdir():
        picture.unlink()
    with pytest.raises(CoterieError, match="house: no images"):
        load("pacs", tmp_path)
    path.parent.rmdir()
    with pytest.raises(CoterieError, match="sketch: class folder 'house' is missing, other domains have it"):
        load("pacs", tmp_path)


def write_digit5(folder: Path) -> dict[str, Any]:
    from scipy.io import savemat

    folder.mkdir(exist_ok=True)

    def pixels(*shape: int) -> Any:
        return DRAW.integers(0, 256, shape, np.uint8)

    y = {"train": np.array([3, 0, 9, 1]), "test": np.array([5, 0])}
    hot = {split: np.eye(10)[labels] for split, labels in y.items()}
    labels = {"label_train": hot["train"], "label_test": hot["test"]}
    mnist = {"train_32": pixels(4, 32, 32), "test_32": pixels(2, 32, 32), **labels}
    savemat(folder / "mnist_data.mat", mnist)
    savemat(folder / "mnistm_with_label.mat", {"train": pixels(4, 28, 28, 3), "test": pixels(2, 28, 28, 3), **labels})
    svhn = {}
    for split, own in y.items():
        svhn[split] = pixels(32, 32, 3, len(own))
        savemat(folder / f"svhn_{split}_32x32.mat", {"X": svhn[split], "y": np.where(own, own, 10)[:, None]})
    synthetic = {f"{split}_data": pixels(len(own), 32, 32, 3) for split, own in y.items()}
    savemat(folder / "syn_number.mat", {**synthetic, **{f"{split}_label": own[:, None] for split, own in y.items()}})
    table = np.empty((2, 2), object)
    for row, own in enumerate(y.values()):
        table[row, 0], table[row, 1] = pixels(len(own), 1, 28, 28) / 255, own[:, None]
    savemat(folder / "usps_28x28.mat", {"dataset": table})
    return {"mnist": mnist, "svhn": svhn, "synthetic": synthetic, "usps": table}


def test_digit5(tmp_path: Path) -> None:
    written = write_digit5(tmp_path / "Digit-Five")
    source = load("digit5", tmp_path)
    data = federate(source, divide(source, "natural"))
    assert data.client_names == ("mnist", "mnist-m", "svhn", "synthetic", "usps")
    assert (data.shape, data.train.sizes, data.test.sizes) == ((3, 32, 32), (4,) * 5, (2,) * 5)
    for client in range(5):
        assert data.train.client(client)[1].tolist() == [3, 0, 9, 1]
        assert data.test.client(client)[1].tolist() == [5, 0]
    for channel in range(3):
        np.testing.assert_array_equal(data.train.client(0)[0][:, channel], written["mnist"]["train_32"])
    np.testing.assert_array_equal(data.train.client(2)[0][1], written["svhn"]["train"][..., 1].transpose(2, 0, 1))
    np.testing.assert_array_equal(data.test.client(3)[0], written["synthetic"]["test_data"].transpose(0, 3, 1, 2))
    grown = torch.nn.functional.interpolate(torch.tensor(written["usps"][0, 0]) * 255, (32, 32), mode="bilinear")
    assert (data.train.client(4)[0][:, :1] - grown).abs().max() <= 0.5 + 1e-4


def test_damaged_digit5(tmp_path: Path) -> None:
    from scipy.io import savemat

    for name, content, says in (
        ("mnist_data.mat", b"MATLAB 5.0 MAT-file, truncated", "cannot be read as a MATLAB file"),
        ("mnist_data.mat", {"train_32": np.zeros((2, 32, 32))}, "no array 'test_32'"),
        ("mnistm_with_label.mat", {"train": 0, "test": 0, "label_train": 1, "label_test": 1}, "not one-hot"),
        ("svhn_train_32x32.mat", {"X": np.zeros((32, 32, 3, 2)), "y": [[1], [2], [3]]}, "do not match 3 labels"),
        ("svhn_train_32x32.mat", {"X": np.full((32, 32, 3, 2), 300), "y": [[1], [2]]}, "pixels from 300 to 300"),
        ("usps_28x28.mat", {"dataset": np.zeros((2, 3))}, r"shape \(2, 3\), expected \(2, 2\)"),
    ):
        write_digit5(tmp_path)
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            savemat(tmp_path / name, content)
        with pytest.raises(CoterieError, match=says):
            load("digit5", tmp_path)
