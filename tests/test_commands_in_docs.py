"""Every command and script of the README and the documents, run top to bottom in a clean folder, as a reader would.

Blocks of a page are `sh` (commands), `python`, `yaml`, or `text` (what a command prints, or a tree of folders).
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coterie.cli import main
from coterie.data.datasets import is_available

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = ["--num-clients", "3", "--local-size", "30", "--test-size", "12"]
ONE = ["--rounds", "1", "--processes", "1"]
SHORTER = {  # so that a page takes seconds; of two equal flags the last one counts
    "run": ONE,
    "compare": [*ONE, "--seeds", "1", "--local-epochs", "1"],
    "tune": [*ONE, "--trials", "2"],
    "leaderboard": ["--processes", "1"],
    "reproduce": [*ONE, "--seeds", "1", "--jobs", "1", "--methods", "local"],
}
BY_BASH = ("deployment.md",)  # several processes at a time
IN_A_CHECKOUT = ("make", "python", "pip")  # tested by `make test` itself and by tests/benchmarks
OWN_TESTS = (  # tests/data/test_documents.py; tests/deploy/test_flower.py; below
    "data.md",
    "flower.md",
    "networks.md",
)


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def commands(block: str) -> list[list[str]]:
    return [words for line in block.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_what_they_are(page: Path) -> None:
    """A command in a block that no test runs is a claim that nothing checks."""
    for kind, content in blocks(page):
        assert kind in ("sh", "python", "yaml", "text"), f"a block of the kind '{kind}':\n{content}"
        if kind == "text":
            assert not re.search(r"^(\$ |coterie |make |pip )", content, re.M), content


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.name not in (*BY_BASH, *OWN_TESTS) and any(kind == "sh" for kind, _ in blocks(page))
    ],
    ids=lambda page: page.name,
)
def test_a_page_runs_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for number, (kind, content) in enumerate(blocks(page)):
        if kind == "python":
            run_script(tmp_path / f"block{number}.py", content)
        elif kind == "sh":
            for words in commands(content):
                run_command(words, tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_page_of_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its blocks of Python are one script."""
    monkeypatch.chdir(tmp_path)
    page = blocks(ROOT / "docs" / "networks.md")
    Path("page.py").write_text("\n".join(content for kind, content in page if kind == "python"), encoding="utf-8")
    made = runpy.run_path("page.py")
    assert capsys.readouterr().out == "3\n"
    x = made["data"].test.x
    assert made["model"](x).shape == (len(x), 10)
    with torch.no_grad():
        personal = made["result"].personal_model(0)
        for network in (made["plain"].eval(), made["loaded"].eval()):
            torch.testing.assert_close(network(personal.preprocess(x)).logits, personal(x), rtol=0, atol=1e-5)
    for words in (words for kind, content in page if kind == "sh" for words in commands(content)):
        run_command(words, tmp_path)


def run_script(path: Path, content: str) -> None:
    """A block that defines a module (its first line names the file) is saved; all others are run."""
    named = re.match(r"# (\w+\.py)\b", content)
    if named:
        (path.parent / named[1]).write_text(content, encoding="utf-8")
        return
    path.write_text(re.sub(r"rounds=\d+", "rounds=1", content), encoding="utf-8")
    runpy.run_path(str(path))


def run_command(words: list[str], folder: Path) -> None:
    program, command, *flags = words
    if program in IN_A_CHECKOUT:
        return
    assert program == "coterie", words
    if command == "reproduce" and "FMNIST" in " ".join(words) and not is_available("fashion-mnist"):
        pytest.skip("Fashion-MNIST is not installed: apt-get install dataset-fashion-mnist")
    own_data = "--dataset" in flags
    shorter = SHORTER.get(command, [])
    if (
        command in ("run", "compare", "tune")
        and not own_data
        and "--resume" not in flags
        and "--partition" not in flags
    ):
        shorter = [*shorter, *TINY]
    if command == "tune" and "--search" not in flags:
        shorter = [flag for flag in shorter if flag not in ("--trials", "2")]
    if "--resume" in flags or "--show" in flags:
        shorter = []
    code: int | str | None = None
    try:
        main([command, *flags, *shorter])
    except SystemExit as ended:
        code = ended.code
    assert not code, f"coterie {shlex.join([command, *flags, *shorter])}: exit {code}"


@pytest.mark.network
@pytest.mark.parametrize("page", [page for page in PAGES if page.name in BY_BASH], ids=lambda page: page.name)
def test_a_page_of_several_processes(page: Path, tmp_path: Path) -> None:
    if not shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    programs = tmp_path / "programs"
    programs.mkdir()
    program = programs / "coterie"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m coterie "$@"\n', encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    script = "set -e\ntrap 'kill $(jobs -p) 2>/dev/null' EXIT\n"
    script += "\n".join(content for kind, content in blocks(page) if kind == "sh")
    folder = tmp_path / "clean"
    folder.mkdir()
    paths = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]
    environment = {**os.environ, "PATH": ":".join(paths), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
