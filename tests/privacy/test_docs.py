"""What docs/encryption.md says is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coterie.methods import METHODS
from coterie.privacy import ckks
from tests.privacy.test_encryption import REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "encryption.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tenseal")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M))
    names: dict[str, object] = {}
    exec(code, names)
    assert 0 < float(capsys.readouterr().out) <= 1
    assert names["on_the_server"].keys.secret is None  # type: ignore[attr-defined]


def test_the_lists_of_methods_are_those_that_are_tested() -> None:
    rows = dict(re.findall(r"^\| (encrypted|refused: [^|]*) \| ([a-z, -]+) \|$", PAGE, re.M))
    listed = {head: set(names.split(", ")) for head, names in rows.items()}
    assert listed.pop("encrypted") == METHODS.keys() - REFUSED.keys()
    assert set().union(*listed.values()) == REFUSED.keys()


def test_sizes_and_limits_are_those_of_the_code() -> None:
    for number in (ckks.FRESH, ckks.SUM):
        assert f"{number:,}" in PAGE
    assert f"beyond {ckks.LIMIT:g} in size" in PAGE
    assert f"at most {ckks.ROOM / ckks.LIMIT:g} clients" in PAGE
    rounds = next(t for t in range(10_000) if 0.99 ** (t + 1) < ckks.LIMIT / ckks.ROOM)
    assert f"runs {rounds} rounds" in PAGE
