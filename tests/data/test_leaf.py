"""FEMNIST and Shakespeare in LEAF's format, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.data import divide, federate, load

DRAW = np.random.default_rng(3)
LINE = "FIRST CITIZEN: Before we proceed any further, hear me speak. ALL: Speak, speak. "


def write(folder: Path, split: str, users: dict[str, tuple[list[Any], list[Any]]], name: str = "all_data_0") -> Path:
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path = folder / split / f"{name}_niid_0_keep_0_{split}_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def images(count: int) -> tuple[list[Any], list[Any]]:
    pixels = DRAW.integers(0, 256, (count, 784))
    return (pixels / 255).tolist(), DRAW.integers(0, 62, count).tolist()


def test_femnist_has_a_client_for_each_writer(tmp_path: Path) -> None:
    writers = {"f0003_41": images(5), "f0001_02": images(3)}
    write(tmp_path / "femnist/data", "train", {"f0003_41": writers["f0003_41"]})
    write(tmp_path / "femnist/data", "train", {"f0001_02": writers["f0001_02"]}, "all_data_1")
    held = {"f0003_41": images(2), "f0001_02": images(1)}
    write(tmp_path / "femnist/data", "test", held)
    source = load("femnist", tmp_path)
    data = federate(source, divide(source, "natural"))
    assert data.client_names == ("f0001_02", "f0003_41")
    assert (data.train.sizes, data.test.sizes, data.classes) == ((3, 5), (1, 2), 62)
    x, y = data.train.client(1)
    assert x.shape == (5, 1, 28, 28)
    np.testing.assert_allclose(x.reshape(5, -1).numpy() / 255, writers["f0003_41"][0], atol=1e-7)  # nothing is lost
    assert y.tolist() == writers["f0003_41"][1]
    assert source.classes[10:12] == ("A", "B")


def test_shakespeare_is_the_character_that_follows(tmp_path: Path) -> None:
    def windows(count: int) -> tuple[list[str], list[str]]:
        text = LINE * 3
        return [text[i : i + 80] for i in range(count)], [text[i + 80] for i in range(count)]

    write(tmp_path, "train", {"CORIOLANUS_FIRST_CITIZEN": windows(9), "HAMLET_HAMLET": windows(4)})
    write(tmp_path, "test", {"CORIOLANUS_FIRST_CITIZEN": windows(2), "HAMLET_HAMLET": windows(1)})
    source = load("shakespeare", tmp_path)
    assert (source.x_train.shape, source.x_train.dtype, len(source.classes)) == ((13, 80), torch.int64, 80)
    assert "".join(source.classes[i] for i in source.x_train[0].tolist()) == LINE
    assert [source.classes[i] for i in source.y_train[:6].tolist()] == list("FIRST ")
    assert source.client_names == ("CORIOLANUS_FIRST_CITIZEN", "HAMLET_HAMLET")


def test_damaged_json(tmp_path: Path) -> None:
    write(tmp_path, "test", {"a": images(1)})
    path = write(tmp_path, "train", {"a": images(2)})
    whole = path.read_text(encoding="utf-8")
    content = json.loads(whole)
    for text, says in (
        (whole[:-20], "cannot be read as a LEAF file"),
        ("[]", "cannot be read as a LEAF file"),
        ("[" * 100_000, "cannot be read as a LEAF file"),
        (json.dumps({**content, "users": ["a", "b"]}), "cannot be read as a LEAF file"),
        (json.dumps({**content, "num_samples": [3]}), "user 'a' does not have 3 samples"),
        (json.dumps({**content, "user_data": {"a": {"x": [[0.5] * 783] * 2, "y": [0, 1]}}}), "784 numbers in 0..1"),
        (json.dumps({**content, "user_data": {"a": {"x": [[9.5] * 784] * 2, "y": [0, 1]}}}), "784 numbers in 0..1"),
        (json.dumps({**content, "user_data": {"a": {"x": [[0.5] * 784, [1]], "y": [0, 1]}}}), "not lists of 784"),
        (json.dumps({**content, "user_data": {"a": {"x": [[0.5] * 784] * 2, "y": [0, 1.5]}}}), "whole numbers"),
        (json.dumps({**content, "user_data": {"a": {"x": [[0.5] * 784] * 2, "y": [0, 62]}}}), "there are 62 classes"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(CoterieError, match=says) as caught:
            load("femnist", tmp_path)
        assert "\n" not in str(caught.value)


def test_damaged_text(tmp_path: Path) -> None:
    for x, y, says in (
        ([LINE[:-1]], ["a"], "a text of 80 characters"),
        ([LINE], ["ab"], "a text of 1 characters"),
        ([LINE], [3], "a text of 1 characters"),
        ([LINE.replace("F", "é", 1)], ["a"], "character 'é' is not one of LEAF's 80"),
    ):
        for split in ("train", "test"):
            write(tmp_path, split, {"role": (x, y)})
        with pytest.raises(CoterieError, match=says):
            load("shakespeare", tmp_path)


def test_users_that_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path, "train", {"a": images(1)})
    write(tmp_path, "test", {"b": images(1)})
    with pytest.raises(CoterieError, match="user 'b' has no training samples; split by samples"):
        load("femnist", tmp_path)
    write(tmp_path, "train", {"a": images(1)}, "all_data_1")
    with pytest.raises(CoterieError, match="user 'a' is in another file, too"):
        load("femnist", tmp_path)
    for path in (tmp_path / "test").iterdir():
        path.unlink()
    for path in (tmp_path / "train").iterdir():
        path.unlink()
    with pytest.raises(CoterieError, match=r"train: no \.json files"):
        load("femnist", tmp_path)
