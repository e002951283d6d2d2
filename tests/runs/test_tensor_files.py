"""Safetensors files: equal content gives equal bytes, and safetensors itself reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from coterie.runs.checkpoint import Snapshot, Writer
from coterie.runs.tensor_files import packed, write_packed
from tests import toy
from tests.runs.test_checkpoint import run, stopped

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([True, False]), "c.d": torch.ones(3, dtype=torch.int64)}
METADATA = {"method": "FedAvg", "classes": "10", "name": 'ü "q" \n \x01 \u2028', "client": "3"}


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    backwards = dict(reversed(TENSORS.items())), dict(reversed(METADATA.items()))
    contents = {packed(TENSORS, METADATA) for _ in range(20)} | {packed(*backwards)}
    for i in range(5):
        write_packed(tmp_path / str(i), TENSORS, METADATA)
        contents.add((tmp_path / str(i)).read_bytes())
    assert len(contents) == 1
    toy.assert_same(load(contents.pop()), TENSORS)
    with safe_open(tmp_path / "0", framework="pt") as file:
        assert file.metadata() == METADATA


def test_two_equal_runs_leave_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a finished run, and the checkpoints of one that was stopped.

    A writer that lags behind puts the clients of several rounds into one file, so each round waits for it.
    """
    hand = Writer.hand

    def hand_and_wait(self: Writer, snapshot: Snapshot) -> None:
        hand(self, snapshot)
        self.settle()

    monkeypatch.setattr(Writer, "hand", hand_and_wait)
    for name in ("a", "b"):
        run(tmp_path / name, "ditto")
        stopped(tmp_path / f"cut-{name}", 2, "ditto")
    for a, b in (("a", "b"), ("cut-a", "cut-b")):
        files = sorted(path.relative_to(tmp_path / a) for path in (tmp_path / a).rglob("*.safetensors"))
        assert files
        for file in files:
            assert (tmp_path / a / file).read_bytes() == (tmp_path / b / file).read_bytes(), file
