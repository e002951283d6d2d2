"""The chaos benchmark in small, that it notices what is wrong, and that docs/security.md shows its figures."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import hostile, kills, page
from benchmarks.chaos.__main__ import SHARES, check, main
from coterie.deploy.wire import Refused
from tests.machines import MOSQUITTO

ROOT = Path(__file__).parents[2]


def told() -> dict[str, Any]:
    return dict(json.loads((ROOT / page.FIGURES).read_text(encoding="utf-8")))


def test_the_page_shows_the_figures_of_the_file(tmp_path: Path) -> None:
    """If this fails: python -m benchmarks.chaos --page"""
    shown = (ROOT / page.PAGE).read_text(encoding="utf-8")
    copy = tmp_path / "security.md"
    copy.write_text(shown, encoding="utf-8")
    page.write(ROOT / page.FIGURES, copy)
    assert copy.read_text(encoding="utf-8") == shown
    assert "| `all` |" in shown


def test_the_published_figures_are_as_they_must_be() -> None:
    figures = told()
    assert figures.keys() == {"parser", "live", "dropouts", *(f"kills {name}" for name in SHARES)}
    assert check(figures) == []
    assert all(not found["commit"].endswith("dirty") for found in figures.values())


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("parser", {"accepted": 1}, "parser: 1 hostile messages were accepted"),
        ("live", {"memory_mb": 200.0}, "live: memory grew by 200.0 MB"),
        ("kills tune", {"bit_equal": 0}, "resumed runs differ"),
    ],
)
def test_wrong_figures_are_told(part: str, change: dict[str, Any], words: str) -> None:
    figures = told()
    (wrong,) = check({**figures, part: {**figures[part], **change}})
    assert words in wrong


def test_hostile_messages_at_the_readers(tmp_path: Path) -> None:
    assert main(["--kills", "0", "--live", "0", "--rounds", "0", "--parser", "1400", "--out", str(tmp_path / "f")]) == 0
    found = json.loads((tmp_path / "f").read_text())["parser"]
    assert found["messages"] == found["refused"] + found["same"] == 1400
    assert all(row["refused"] > 150 for row in found["readers"].values())


def test_a_reader_that_believes_anything_is_noticed(tmp_path: Path) -> None:
    reader = hostile.readers(tmp_path)["server: answers"]

    def credulous(message: bytes) -> Any:
        try:
            return reader.read(message)
        except Refused:
            return reader.read(reader.good)._replace(tensors={})

    believed = reader._replace(read=credulous, same=lambda found: bool(found.tensors))
    assert hostile.tally(believed, 0, 50)["accepted"] == 50


def test_kills_of_a_run(tmp_path: Path) -> None:
    found = kills.killed("run", 2, tmp_path, random.Random(0))
    assert found["kills"] == 2
    assert found["runs"] == found["bit_equal"] >= 1


def test_one_changed_bit_is_not_bit_equal(tmp_path: Path) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    kills.finish(kills.Machine(tmp_path / "log", (*kills.run(whole, 0), "--rounds", "1")))
    shutil.copytree(whole, other)
    assert kills.content(whole) == kills.content(other)
    changed = bytearray((other / "models" / "client-0.safetensors").read_bytes())
    changed[-1] ^= 1
    (other / "models" / "client-0.safetensors").write_bytes(changed)
    assert kills.content(whole) != kills.content(other)


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed: apt-get install mosquitto")
def test_hostile_messages_through_a_broker(tmp_path: Path) -> None:
    found = hostile.live(200, 0, tmp_path, rounds=4)
    assert found["messages"] == 200
    assert found["federations"] == found["equal_to_simulation"] >= 1
