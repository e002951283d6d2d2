"""The scripts in examples/ run, in small."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.long
def test_adapters(tmp_path: Path) -> None:
    out = tmp_path / "adapters.json"
    runpy.run_path(str(EXAMPLES / "adapters.py"))["main"](["--quick", "--device", "cpu", "--out", str(out)])
    arms = {arm["trained"] + " " + arm["method"]: arm for arm in json.loads(out.read_text(encoding="utf-8"))["arms"]}
    full, shared, heads = arms["full fedper"], arms["lora fedper"], arms["head local"]
    assert full["frozen_parameters"] == 0
    assert shared["frozen_parameters"] == heads["frozen_parameters"] > 40 * shared["trained_parameters"]
    adapters = 8 * (192 + 3 * 192) + 8 * (192 + 192)  # rank 8 on qkv and out of one layer
    assert shared["trained_parameters"] == adapters + heads["trained_parameters"]
    assert shared["bytes"] < 0.02 * full["bytes"]
    assert heads["bytes"] == 0
    assert all(0 < arm["accuracy"] <= 1 for arm in arms.values())
