"""Several trainings at a time: the same results, nothing lost with a worker, and no process left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from coterie.api import Execution
from coterie.api.progress import Lines
from coterie.cli import main
from coterie.execution import looped
from coterie.papers.recipes import find
from coterie.papers.reproduce import cells, reproduce
from coterie.papers.results import Shelf
from coterie.runs.jobs import JobSpec, side_by_side
from coterie.runs.stopping import Stopped
from tests.runs.test_resume import begin, end, gone, until

HEAD = """\
id: {id}
paper: Ours
place: Table 1
protocol: pac
dataset: fashion-mnist-small
partition: {{rule: dominant, num_clients: 4, noniid_s: {noniid_s}, local_size: 40, test_size: 20}}
model: linear
settings: {{rounds: 2, join_ratio: 1.0, local_epochs: 1, batch_size: 20, lr: 0.1, momentum: 0.5, weight_decay: 0.0}}
report: last
average: clients
rows:
"""
LONG = "{name: Long, method: fedavg, settings: {rounds: 1000000}}"
LONGER = "{name: Longer, method: ditto, settings: {rounds: 1000000}}"
WILD = "{name: Wild, method: local, settings: {lr: 1.0e+38}}"
SHORT = [f"{{name: Short{epochs}, method: local, settings: {{local_epochs: {epochs}}}}}" for epochs in (1, 2, 3)]


def written(folder: Path, id: str, *rows: str, noniid_s: int = 20) -> Path:
    path = folder / f"{id}.yaml"
    path.write_text(HEAD.format(id=id, noniid_s=noniid_s) + "".join(f"  - {row}\n" for row in rows))
    return path


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Every file of results, but for what the time of day and the load of the machine have a part in."""
    found = {str(path.relative_to(folder)): json.loads(path.read_text()) for path in folder.glob("*/*.json")}
    for content in found.values():
        assert content.pop("seconds")["total"] > 0
        content.pop("date")
        content["hardware"].pop("jobs", None)
    return found


def test_the_same_results_each_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two recipes that share Short2; one of them is named twice."""
    written(here, "mine", *SHORT[:2])
    written(here, "other", *SHORT[1:], "{name: FedAvg, method: fedavg}")
    command = ["reproduce", "mine.yaml", "other.yaml", "./mine.yaml", "--seeds", "1", "--processes", "1"]
    main([*command, "--format", "csv", "--out", "one"])
    alone = capsys.readouterr().out
    main([*command, "--format", "csv", "--out", "two", "--jobs", "2"])
    assert capsys.readouterr().out == alone
    tables = [table.splitlines() for table in alone.split("\n\n") if table.startswith("method,published")]
    assert [[line.split(",")[0] for line in table[1:]] for table in tables] == [
        ["Short1", "Short2"], ["Short2", "Short3", "FedAvg"],
    ]  # fmt: skip
    assert results(here / "two") == results(here / "one")
    assert sorted(name.split("-seed")[0] for name in results(here / "two")) == [
        "mine/local", "mine/local", "other/fedavg", "other/local",
    ]  # fmt: skip
    main([*command, "--out", "two", "--jobs", "2"])
    assert "starts" not in capsys.readouterr().out  # nothing again


def go(path: Path, folder: Path, say: Any) -> list[str]:
    recipe = find(str(path))
    return reproduce(
        [(recipe, recipe.rows)], Shelf(folder), seeds=1, rounds=None, how=Execution(processes=1), data_dir=None,
        commit="abc", watching=lambda title, rounds: Lines(title, rounds, None), jobs=2, say=say,
    )  # fmt: skip


def workers() -> list[BaseProcess]:
    """Those of this process, the oldest first."""
    found = [process for process in multiprocessing.active_children() if process.name.startswith("SpawnProcess-")]
    return sorted(found, key=lambda process: int(process.name.split("-")[1]))


def test_what_fails_takes_nothing_with_it(tmp_path: Path) -> None:
    """One training diverges; the process of another is killed when the first one beside it is done."""
    lines: list[str] = []

    def say(line: str) -> None:
        if line.startswith("2/") and not line.endswith("starts"):
            workers()[0].kill()
        lines.append(line)

    wrong = go(written(tmp_path, "mine", LONG, SHORT[0], WILD, *SHORT[1:]), tmp_path / "out", say)
    died = "mine Long seed 0: its process was killed (out of memory? try fewer --jobs); the same command"
    assert sorted(reason.startswith((died, "mine Wild seed 0: ")) for reason in wrong) == [True, True]
    methods = [content["settings"]["method"] for content in results(tmp_path / "out").values()]
    assert sorted(method["train"]["local_epochs"] for method in methods) == [1, 2, 3]
    assert lines.pop(0).startswith("5 trainings of 8.0 million local steps on fashion-mnist-small: about ")
    assert lines[:2] == [f"{i}/5  mine {name} seed 0  starts" for i, name in ((1, "Long"), (2, "Short1"))]
    assert workers() == []


def test_asked_to_stop(tmp_path: Path) -> None:
    def say(line: str) -> None:
        if line.startswith("2/") and not line.endswith("starts"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="the same command continues") as stop:
        go(written(tmp_path, "mine", LONG, *SHORT), tmp_path / "out", say)
    assert stop.value.signal == signal.SIGTERM
    assert len(results(tmp_path / "out")) >= 1
    assert workers() == []


def spoil(begun: Path) -> str:
    try:
        begun.touch()
        time.sleep(60)
    finally:
        raise RuntimeError("it does not even stop well")


def test_what_goes_wrong_while_stopping_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def ask() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    with pytest.raises(Stopped):
        side_by_side([JobSpec("a", tmp_path / "begun"), JobSpec("b", tmp_path / "too")], spoil, 2, lambda line: None)
    thread.join()
    assert "Traceback" not in capfd.readouterr().err
    assert workers() == []


def test_ctrl_c_at_a_terminal(tmp_path: Path) -> None:
    """It goes to all processes of the command, also to those that the workers have started."""
    path, out = written(tmp_path, "mine", LONG, SHORT[0], LONGER), tmp_path / "out"
    run = begin("reproduce", path, "--jobs", "2", "--seeds", "1", "--processes", "2", "--out", out)
    until(lambda: len(list(out.glob("*/*.json"))) == 1, run)
    os.killpg(run.pid, signal.SIGINT)
    code, errors = end(run)
    assert code == 128 + signal.SIGINT, errors
    assert "coterie: stopped; finished results are kept, and the same command continues" in errors
    assert "Traceback" not in errors
    assert gone(run.pid)
    assert len(results(out)) == 1


def test_those_on_the_same_data_stay_together(tmp_path: Path) -> None:
    spread = {"a": 20, "b": 50, "c": 20}
    paths = [written(tmp_path, id, row, noniid_s=s) for (id, s), row in zip(spread.items(), SHORT, strict=True)]
    asked = [(recipe, recipe.rows) for recipe in (find(str(path)) for path in paths)]
    assert [cell.recipe.id for cell in cells(asked, 1, None)] == ["a", "c", "b"]


def test_the_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(looped, "_sharing", 1)
    assert looped.cores() == 8
    for trainings, cores in ((2, 4), (3, 2), (16, 1)):
        looped.share_cores(trainings)
        assert looped.cores() == cores


def test_a_request_to_stop_while_a_worker_exits_is_silent() -> None:
    """Its jobs are done, and torch is cleaning up."""
    script = """
import atexit, os, signal
from multiprocessing import Pipe
from coterie.runs.jobs import serve
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
ours, theirs = Pipe()
ours.close()
serve(theirs, print, 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
