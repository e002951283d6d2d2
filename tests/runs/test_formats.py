"""Run folders of other versions of Coterie: every command says in one line what they are and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coterie.api.saved_run import load_run
from coterie.cli import main
from coterie.core.version import VERSION
from coterie.runs.checksums import FORMAT, OtherFormat
from coterie.runs.config import read_config
from coterie.runs.finding import open_run

STORED = Path(__file__).parent / "version1" / "config.json"  # written by version 1, shortened
COMMANDS = ("models {}", "predict {} x.npz --client 0", "evaluate {}", "export {} --client 0 --to torch",
            "adapt {} --data x.npz", "report {} --out page.html", "resume {}", "resume {} --rounds 9")  # fmt: skip


@pytest.fixture(params=["finished", "unfinished"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of version 1, which had no checksums."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "old"
    path.mkdir()
    shutil.copy(STORED, path)
    (path / "metrics.csv").write_text("round,participants\n1,4\n")
    if request.param == "finished":
        (path / "result.json").write_text('{"method": "FedPAC"}')
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_version(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as stop:
        main(command.format("old").split())
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "old/config.json: a run of format 1, written by Coterie 0.1.0" in line
    assert f"Coterie {VERSION} reads format {FORMAT}" in line
    assert "Open it with Coterie 0.1.0, or repeat the run" in line
    assert sorted(folder.iterdir()) == before


def test_python_says_the_same(folder: Path) -> None:
    for read in (load_run, read_config, lambda path: open_run(path).missing):
        with pytest.raises(OtherFormat, match=r"written by Coterie 0\.1\.0"):
            read(folder)


def test_a_folder_of_a_later_version(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format": FORMAT + 1, "ran": {"coterie": "9.1"}}))
    with pytest.raises(OtherFormat, match=rf"format {FORMAT + 1}, written by Coterie 9\.1.*Upgrade Coterie"):
        load_run(folder)
