"""docs/data.md from top to bottom: its Python runs, its commands run, and what it shows is what comes out."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from coterie.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SHORTER = {  # so that the test takes seconds; of two equal flags the last one counts
    "run": ["--rounds", "1", "--join-ratio", "0.1", "--no-full-last-round", "--processes", "1"],
    "compare": ["--rounds", "1", "--seeds", "1", "--processes", "1"],
}


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def command(line: str) -> int:
    words = shlex.split(line)
    assert words[0] == "coterie"
    try:
        main([*words[1:], *SHORTER.get(words[1], [])])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.long
def test_the_page_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    codes, shown = [], ""
    for number, (kind, content) in enumerate(blocks(PAGE)):
        if kind == "python" and "class Net" in content:
            Path("mynet.py").write_text(content, encoding="utf-8")
        elif kind == "python":
            script = tmp_path / f"block{number}.py"
            script.write_text(re.sub(r"rounds=\d+", "rounds=1", content), encoding="utf-8")
            runpy.run_path(str(script))
        elif kind == "sh":
            capsys.readouterr()
            codes += [command(line) for line in content.splitlines()]
            shown = capsys.readouterr().out
        else:
            assert shown == content
    assert codes[:4] == [0, 0, 1, 0]  # the check of the hospitals finds missing values
    assert not any(codes[4:])
    assert len(codes) == 13
