"""What the page says is run."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import coterie
from coterie.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "personal-models.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])  # main adds to it
    x, y = coterie.load_clients(num_clients=6, local_size=100).test.client(0)
    Image.fromarray(x[0, 0].numpy()).save("boot.png")
    np.savez("new_shop.npz", x=x.numpy(), y=y.numpy())
    page = PAGE.read_text(encoding="utf-8")
    (commands,) = re.findall(r"^```console\n(.*?)^```", page, re.S | re.M)
    for line in commands.splitlines():
        main([*shlex.split(line)[1:]])
    told = capsys.readouterr().out
    assert "before" in told
    assert Path("client-3.onnx").stat().st_size > 400_000  # 117,000 weights
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    Path("use.py").write_text(code, encoding="utf-8")
    runpy.run_path("use.py")
    assert "Ankle boot" in capsys.readouterr().out
