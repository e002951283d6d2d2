"""A comparison that is killed and resumed ends like one that never was; real processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coterie.cli import main
from tests.runs.test_checkpoint import assert_same
from tests.runs.test_resume import begin, end, rounds, until

COMPARE = [
    "compare", "fedavg", "fedavg-ft", "ditto", "-nc", "6", "--local-size", "30", "--test-size", "20", "--model",
    "linear", "-jr", "0.5", "--rounds", "20", "--seeds", "2", "--validation", "0.2", "--new-clients", "0.34",
    "--processes", "1", "--against", "fedavg",
]  # fmt: skip
RUNS = [f"{name}-seed{seed}" for name in ("fedavg", "ditto") for seed in (0, 1)]


def outcomes(base: Path) -> dict[str, Any]:
    """All but what a clock says, and where it is."""
    table = json.loads((base / "compare.json").read_text())
    assert table.pop("folder") == str(base)
    for row in table["outcomes"]:
        assert row.pop("seconds") > 0
    return dict(table)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A comparison that was never stopped, and one that was stopped in its first run and killed in its third."""
    top = tmp_path_factory.mktemp("comparisons")
    whole, cut = top / "whole", top / "cut"
    assert end(begin(*COMPARE, "--out", whole))[0] == 0
    process = begin(*COMPARE, "--out", cut)
    until(lambda: rounds(cut / RUNS[0]) >= 2, process)
    os.killpg(process.pid, signal.SIGTERM)
    code, errors = end(process)
    assert code == 128 + signal.SIGTERM
    assert f"`coterie resume {cut}` continues the whole comparison" in errors
    process = begin("resume", cut)
    until(lambda: rounds(cut / RUNS[2]) >= 2, process)
    process.kill()
    end(process)
    return whole, cut


@pytest.mark.long
def test_what_was_missing_is_run_and_nothing_else(bases: tuple[Path, Path]) -> None:
    whole, cut = bases
    assert not (cut / "compare.json").exists()
    assert not (cut / RUNS[2] / "result.json").exists()
    (cut / RUNS[3]).mkdir()  # as if killed when this one began
    (cut / RUNS[3] / "config.json.part").write_text("{")
    before = {name: (cut / name / "result.json").stat().st_mtime_ns for name in RUNS[:2]}
    code, errors = end(begin("resume", cut))
    assert code == 0, errors
    assert outcomes(whole) == outcomes(cut)
    assert before == {name: (cut / name / "result.json").stat().st_mtime_ns for name in RUNS[:2]}
    for name in RUNS:
        assert_same(whole / name, cut / name)


@pytest.mark.long
def test_what_is_refused(bases: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        with pytest.raises(SystemExit) as stop:
            main(["resume", str(tmp_path)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    whole, _ = bases
    main(["resume", str(whole)])
    assert "is finished; --rounds N extends its runs" in capsys.readouterr().err
    (tmp_path / "command.json").write_text('{"command": {"methods": ["fedavg"]}}')
    assert "it has no command" in refused()
    command = json.loads((whole / "command.json").read_text())
    command["command"]["local_size"] = 31
    (tmp_path / "command.json").write_text(json.dumps(command))
    assert "the data are not those" in refused()
    assert [path.name for path in tmp_path.iterdir()] == ["command.json"]
