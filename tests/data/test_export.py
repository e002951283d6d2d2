"""Exported data are read again as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import coterie
from coterie.cli import main
from coterie.data.user import Reading
from coterie.data.user.check import check


def test_tables_in_clinical_units(tmp_path: Path) -> None:
    hearts = coterie.load_clients("heart-disease")
    main(["data", "export", str(tmp_path / "hospitals"), "--dataset", "heart-disease"])
    first = (tmp_path / "hospitals" / "train" / "cleveland.csv").read_text(encoding="utf-8").splitlines()
    assert first[0] == "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,label"
    assert first[1] == "63,1,1,145,233,1,2,150,0,2.3,3,0,6,healthy"  # the first patient of the publisher's file
    again = coterie.load_clients(str(tmp_path / "hospitals"), missing="median")
    assert check(tmp_path / "hospitals", Reading(missing="median")).fine
    names = {name: number for number, name in enumerate(again.client_names)}
    for client, name in enumerate(hearts.client_names):
        x, y = hearts.test.client(client)
        same_x, same_y = again.test.client(names[name])
        chol = [column.name for column in hearts.transform.columns].index("chol")
        assert torch.allclose(x[:, chol], same_x[:, chol], equal_nan=True)
        assert [hearts.class_names[k] for k in y] == [again.class_names[k] for k in same_y]


def test_images(tmp_path: Path) -> None:
    clothes = coterie.load_clients("fashion-mnist-small", num_clients=2, local_size=20, test_size=10)
    main(["data", "export", str(tmp_path / "shops"), "--num-clients", "2", "--local-size", "20", "--test-size", "10"])
    again = coterie.load_clients(str(tmp_path / "shops"))
    assert again.client_names == ("client-0", "client-1")
    for client in range(2):
        before, after = (data.train.client(client)[0].flatten(1) for data in (clothes, again))
        assert sorted(map(bytes, before.numpy())) == sorted(map(bytes, after.numpy()))


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "export", str(tmp_path), "--dataset", "heart-disease"])
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == []
