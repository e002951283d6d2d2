"""Pictures of rebalancing: read back by another program, and counted by hand."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import coterie
from coterie.cli import main
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedreg import FedReG
from coterie.report.data_pictures import augmented_samples, class_pictures, png, sheet
from tests import toy


@pytest.mark.parametrize("channels", [1, 3])
def test_png_is_read_by_pillow(channels: int) -> None:
    image = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    read = np.asarray(Image.open(io.BytesIO(png(image))))
    assert np.array_equal(read.reshape(5, 7, channels), image.permute(1, 2, 0).numpy())


def test_a_sheet_has_every_image_in_its_place() -> None:
    rows = [torch.full((2, 1, 3, 3), value, dtype=torch.uint8) for value in (10, 20)]
    whole = sheet(rows, gap=1, scale=2)
    assert whole.shape == (1, 16, 16)
    assert whole[0, 0, 0] == 10
    assert whole[0, 8, 8] == 20
    assert whole[0, 7, 7] == 255


def test_classes_after_rebalancing_are_equal() -> None:
    """Sizes 13, 20, 1, 31, 8: 14 on average, so client 0 with two classes gets seven of each."""
    after = class_pictures(toy.toy(), FedReG())["classes-after.svg"]
    told = re.findall(r"<title>client 0, (\d): (\d+)</title>", after)
    assert told == [("0", "7"), ("1", "7")]


def test_samples_are_shown_as_they_are_and_varied() -> None:
    data = coterie.load_clients(num_clients=5, local_size=20, test_size=20)
    picture = np.asarray(Image.open(io.BytesIO(augmented_samples(data, FedReG(), count=4) or b"")))
    assert picture.shape == (3 * 30 * 3, 4 * 30 * 3)
    first, second, third = np.split(picture, 3)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, third)


def test_other_methods_leave_the_data_as_they_are() -> None:
    data = coterie.load_clients(num_clients=5, local_size=20, test_size=20)
    assert class_pictures(data, FedAvg()) == {}
    assert augmented_samples(data, FedAvg()) is None
    assert class_pictures(data, FedReG(rebalance=False)) == {}


def test_the_command(tmp_path: Path) -> None:
    main(["pictures", "--num-clients", "5", "--local-size", "20", "--test-size", "20", "--out", str(tmp_path / "p")])
    names = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert names == ["augmented.png", "classes-after.svg", "classes-before.svg", "partition.svg"]
