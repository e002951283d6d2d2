"""The table of personal adapters in docs/networks.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scipy import stats

from tools import adapters

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_file() -> None:
    """If this fails: python -m tools.adapters"""
    assert adapters.page(ROOT) == (ROOT / adapters.PAGE).read_text(encoding="utf-8")


def test_an_edited_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (adapters.PAGE, adapters.FILE):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    adapters.main(["--check"])
    page = adapters.PAGE.read_text(encoding="utf-8")
    block = page.split("<!-- adapters -->")[1].split("<!-- end -->")[0]
    number = re.search(r"\d\d\.\d", block.split("|---|")[1])  # of an accuracy
    assert number
    adapters.PAGE.write_text(page.replace(number[0], "99.9", 1), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"docs/networks\.md does not match benchmarks/results/adapters\.json"):
        adapters.main(["--check"])
    adapters.main([])
    assert adapters.PAGE.read_text(encoding="utf-8") == page


def test_a_row() -> None:
    found = json.loads((ROOT / adapters.FILE).read_text(encoding="utf-8"))
    arm = found["arms"][1] | {"trained_parameters": 57226, "lr": 3e-4}
    shares = [0.5, 0.52, 0.57]
    arm["runs"] = [
        {"accuracy": y, "accuracy_by_round": [[1, 0.1], [2, 0.4], [3, 0.45], [4, y]], "bytes": 12e6, "seconds": seconds}
        for y, seconds in zip(shares, (9.0, 2.0, 3.04), strict=True)
    ]
    low, high = stats.t.interval(0.95, 2, loc=53, scale=stats.sem([50, 52, 57]))
    half = f"53.0 ± {(high - low) / 2:.1f}"
    assert adapters.row(arm) == [arm["name"], "FedPer", "0.0003", "57,226", half, "40.0 ± 0.0", "12.0", "3.0"]
