"""Images of different sizes: --resize makes them one size, in training and for predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import CoterieError
from coterie.data.user import check
from coterie.data.user.reading import Reading

Image = pytest.importorskip("PIL.Image")
DRAW = np.random.default_rng(8)


def write(folder: Path, grey: bool = False) -> None:
    for client in ("north", "south"):
        for label in ("cat", "dog"):
            (folder / client / label).mkdir(parents=True)
            for i in range(6):
                size = (8 + i, 12) if grey else (8 + i, 12, 3)
                Image.fromarray(DRAW.integers(0, 256, size, np.uint8)).save(folder / client / label / f"{i}.png")


@pytest.mark.parametrize("grey", [False, True])
def test_one_size_for_all(tmp_path: Path, grey: bool) -> None:
    write(tmp_path, grey)
    with pytest.raises(CoterieError, match="--resize makes images one size"):
        coterie.load_clients(str(tmp_path))
    clients = coterie.load_clients(str(tmp_path), resize=8)
    assert clients.shape == ((1, 8, 8) if grey else (3, 8, 8))
    first = np.asarray(Image.open(tmp_path / "north" / "cat" / "0.png"))  # 8 rows: only the columns are cropped
    middle = torch.from_numpy(first[:, 2:10].copy().reshape(8, 8, -1)).permute(2, 0, 1)
    everything = torch.cat([clients.train.x, clients.test.x])
    assert any(torch.equal(image, middle) for image in everything)
    assert check(str(tmp_path), Reading(resize=8)).fine
    assert not check(str(tmp_path), Reading()).fine


def test_sixteen_bits(tmp_path: Path) -> None:
    write(tmp_path)
    for path in tmp_path.rglob("*.png"):
        Image.fromarray(DRAW.integers(0, 2**16, (10, 20), np.uint16)).save(path)
    clients = coterie.load_clients(str(tmp_path), resize=5)
    assert (clients.shape, clients.train.x.dtype) == ((1, 5, 5), torch.float32)
    assert 0 <= clients.train.x.min() < clients.train.x.max() <= 1


def test_predictions_see_what_training_saw(tmp_path: Path) -> None:
    from coterie.personal.samples import read_image
    from coterie.runs.finding import open_run

    write(tmp_path / "photos")
    clients = coterie.load_clients(str(tmp_path / "photos"), resize=8)
    coterie.run("local", clients, "linear", rounds=1, out=tmp_path / "run")
    run = open_run(tmp_path / "run")
    everything = torch.cat([clients.train.x, clients.test.x])
    for path in (tmp_path / "photos").rglob("*.png"):
        read = read_image(run, path, resize=True)
        assert any(torch.equal(image, read) for image in everything), path


def test_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label,client\n1,0,a\n2,1,a\n", encoding="utf-8")
    with pytest.raises(CoterieError, match="--resize is for image files, not for tables"):
        coterie.load_clients(str(tmp_path / "a.csv"), resize=8)
    with pytest.raises(CoterieError, match="resize must be at least 1, got -3"):
        coterie.load_clients(str(tmp_path / "a.csv"), resize=-3)
    with pytest.raises(CoterieError, match="heart-disease has samples of one shape"):
        coterie.load_clients("heart-disease", resize=8)
