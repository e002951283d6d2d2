"""`coterie resume` as a user meets it: real processes that are stopped, killed, or meet each other."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.cli import main
from tests.runs.test_checkpoint import assert_same

TINY = ["-nc", "5", "--local-size", "30", "--test-size", "20", "--model", "linear", "-jr", "0.4"]
LONG = [*TINY[:-4], "-jr", "1", "--model", "cnn", "-ls", "100000", "--rounds", "3"]


def begin(*arguments: str | Path) -> subprocess.Popen[str]:
    """In a group of its own, as a terminal starts it."""
    return begin_with([], *arguments)


def begin_with(before: list[str], *arguments: str | Path) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "coterie", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def end(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, errors


def until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rounds(out: Path) -> int:
    path = out / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def gone(group: int) -> bool:
    """Whether no process of this group is left, ten seconds from now at the latest."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


DITTO = ["run", "ditto", *TINY, "--rounds", "50", "--processes", "2", "--out"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert end(begin(*DITTO, out))[0] == 0
    return out


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGHUP, 1)])
def test_a_signal_ends_the_round_and_resume_goes_on(
    number: signal.Signals, times: int, whole: Path, tmp_path: Path
) -> None:
    """Sent to all processes, as terminals and batch schedulers do, and some more than once, as `timeout` does."""
    cut = tmp_path / "cut"
    run = begin(*DITTO, cut)
    until(lambda: rounds(cut) >= 3, run)
    for _ in range(times):
        os.killpg(run.pid, number)
    code, errors = end(run)
    assert code == 128 + number, errors
    assert "again to stop at once" in errors
    done = rounds(cut)
    assert done < 50
    assert f"stopped after round {done}; `coterie resume {cut}` continues after round {done}" in errors
    assert "Traceback" not in errors
    assert gone(run.pid)
    code, errors = end(begin("resume", cut))
    assert code == 0, errors
    assert_same(whole, cut)


def test_a_finished_run_is_not_resumed(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["resume", str(whole)])
    assert "is finished" in capsys.readouterr().err


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """Its run cannot print any more, and still ends the round and saves."""
    terminal, side = os.openpty()
    command = [sys.executable, "-m", "coterie", "run", "ditto", *TINY, "--rounds", "500", "--processes", "2"]
    run = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command, "--out", tmp_path / "r"], stdin=side, stdout=side, stderr=side,
        text=True, start_new_session=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(side)
    try:
        until(lambda: rounds(tmp_path / "r") >= 3, run)
        os.close(terminal)
        assert run.wait(60) == 128 + signal.SIGHUP
    finally:
        run.kill()
    done = rounds(tmp_path / "r")
    assert done < 500
    assert (tmp_path / "r" / "checkpoint" / f"server-{done:06}.safetensors").exists()


def test_nohup_is_heeded(tmp_path: Path) -> None:
    run = begin_with(["nohup"], "run", "ditto", *TINY, "--rounds", "30", "--processes", "2", "--out", tmp_path / "r")
    until(lambda: rounds(tmp_path / "r") >= 3, run)
    os.killpg(run.pid, signal.SIGHUP)
    code, errors = end(run)
    assert (code, rounds(tmp_path / "r") >= 30) == (0, True), errors


@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_the_second_signal_stops_at_once(
    number: signal.Signals, group: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a round that takes hours; no worker stays behind. Meanwhile nobody else may go on with it."""
    run = begin("run", "fedavg", *LONG, "--processes", "2", "--out", tmp_path / "r")
    until(lambda: rounds(tmp_path / "r") == 0, run)
    with pytest.raises(SystemExit, match="2"):
        main(["resume", str(tmp_path / "r")])
    assert "another process is using" in capsys.readouterr().err
    send = os.killpg if group else os.kill  # as a terminal does, or `kill PID`
    send(run.pid, number)
    assert run.stderr
    while "again to stop at once" not in run.stderr.readline():
        pass
    time.sleep(0.5)
    assert run.poll() is None  # the round goes on
    send(run.pid, number)
    code, errors = end(run, timeout=20)
    assert code == 128 + number, errors
    assert "Traceback" not in errors
    assert gone(run.pid)


def test_a_killed_run_leaves_no_process_and_no_lock(tmp_path: Path) -> None:
    run = begin("run", "fedavg", *LONG, "--processes", "2", "--out", tmp_path / "r")
    until(lambda: rounds(tmp_path / "r") == 0, run)
    run.kill()
    end(run)
    assert gone(run.pid)
    again = begin("resume", tmp_path / "r")
    try:
        until(lambda: "starts again" in (tmp_path / "r" / "log.txt").read_text(), again)
    finally:
        again.kill()
        end(again)


def test_what_resume_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "config.json").write_text('{"format": 2}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"command": ')
    for name, said in {
        "nowhere": "it has no config.json",
        "python": "not started by a command",
        "broken": "cannot be read",
    }.items():
        with pytest.raises(SystemExit) as stop:
            main(["resume", str(tmp_path / name)])
        assert stop.value.code == 2
        assert said in capsys.readouterr().err


def test_deterministic_is_set_before_anything_is_computed() -> None:
    script = (
        "import os, torch, coterie\n"
        "from tests import toy\n"
        "how = coterie.Execution('looped', processes=1, deterministic=True)\n"
        "def watch(record):\n"
        "    print(torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG'])\n"
        "coterie.run(toy.method('fedavg'), toy.toy(), toy.network(), rounds=1, backend=how, watch=watch)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.split()[:2] == ["True", ":4096:8"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto", "scaffold", "fedpac", "knn-per", "fedem"])
def test_deterministic_runs_go_on_bit_for_bit_on_a_gpu(name: str, tmp_path: Path) -> None:
    model = ["-nc", "5", "--local-size", "30", "--test-size", "20", "-jr", "0.4", "--model", "cnn"]
    arguments = ["run", name, *model, "--rounds", "60", "--device", "cuda", "--deterministic", "--out"]
    code, errors = end(begin(*arguments, tmp_path / "whole"))
    assert code == 0, errors
    run = begin(*arguments, tmp_path / "cut")
    until(lambda: rounds(tmp_path / "cut") >= 5, run)
    run.kill()
    end(run)
    code, errors = end(begin("resume", tmp_path / "cut"))
    assert code == 0, errors
    assert_same(tmp_path / "whole", tmp_path / "cut")


KILLS = 50


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    """kill -9 at random moments, again and again until the run is through; as if it had never been stopped."""
    draw, kills, lost = random.Random(0), 0, 0
    methods = ("fedavg", "fedper", "ditto", "scaffold", "fedpac", "knn-per", "fedfomo")
    while kills < KILLS:
        name = methods[kills % len(methods)]
        where = draw.choice(["looped", "stacked"])
        arguments = ["run", name, *TINY, "--rounds", "60", "--backend", where, "--seed", str(kills), "--out"]
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        start = time.monotonic()
        assert end(begin(*arguments, whole))[0] == 0
        long = time.monotonic() - start
        for _ in range(20):  # at most so often, then to the end
            process = begin("resume", cut) if (cut / "config.json").exists() else begin(*arguments, cut)
            try:
                process.wait(draw.uniform(0.3, 1) * long)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
            code, errors = end(process)
            assert code in (0, -signal.SIGKILL), errors
            if code == 0:
                break
            if not (cut / "config.json").exists():  # killed before it began
                shutil.rmtree(cut, ignore_errors=True)
                lost += 1
        else:
            assert end(begin("resume", cut))[0] == 0
        assert_same(whole, cut)
        assert json.loads((cut / "config.json").read_text())["federation"]["rounds"] == 60
        shutil.rmtree(whole)
        shutil.rmtree(cut)
    print(f"{kills} kills, {lost} before the run had a folder")
