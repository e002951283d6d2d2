"""The page that is served while a run goes on: as a program on this machine meets it."""

from __future__ import annotations

import html
import http.client
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.report import live
from coterie.report.live import LivePage
from coterie.runs.following import FollowedRun
from tests import toy
from tests.api.test_run import Interrupter

pytestmark = pytest.mark.network


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0.0)
    monkeypatch.setattr(live, "PAUSE", -1.0)


def get(page: LivePage, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, version and body."""
    connection = http.client.HTTPConnection("127.0.0.1", page.server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers.get("ETag") or "", body


def numbers(body: str) -> list[list[str]]:
    """Lines of the table of rounds."""
    lines = re.findall(r'<tr><th scope="row">(\d+)</th>(.*?)</tr>', body)
    return [[number, *re.findall(r"<td>(.*?)</td>", cells)] for number, cells in lines]


def run(out: Path, name: str = "fedpac", **how: Any) -> coterie.Result:
    how = {"rounds": 2, "backend": toy.IN_TURN, "progress": False, **how}
    return coterie.run(toy.method(name), toy.toy(), toy.network(), out=out, **how)


def progress(body: str) -> dict[str, list[str]]:
    """Run -> cells of the table of progress."""
    shown = body.split("<tbody>")[1].split("</tbody>")[0]
    lines = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', shown)
    return {name: re.findall(r"<td>(.*?)</td>", cells) for name, cells in lines}


def test_rounds_are_shown_as_they_end(tmp_path: Path) -> None:
    """By a page that knows only the folder, as one of another process does."""
    with LivePage(0, [tmp_path]) as page:
        assert "No run has started yet" in get(page, "/")[2]
        seen = []

        def watch(record: coterie.Round) -> None:
            _, version, body = get(page, "/news")
            assert get(page, "/news", **{"If-None-Match": version})[0] == 304  # nothing new
            seen.append((record, numbers(body), progress(body)["FedPAC"]))

        result = run(tmp_path / "run", watch=watch, join_ratio=0.8, full_last_round=False)
        status, _, whole = get(page, "/")
        assert status == 200
        assert "FedPAC: round 2 of 2, finished" in whole
        assert "connect-src 'self'" in html.unescape(whole)
        assert not re.search(r"(src|href)=.https?:", whole)
        assert "<svg" in whole
        assert get(page, "/etc/passwd")[0] == 404
    for number, (record, lines, (state, rounds, _, score, clients, left, up, *_)) in enumerate(seen, 1):
        assert (state, rounds, clients, left) == ("running", f"{number} of 2", "4", "none")
        scores = record.scores["pre", "test"].value * 100
        assert score == f"{scores.mean():.1f} ({scores.min():.1f} to {scores.max():.1f})"
        assert up == f"{sum(r.bytes_up for r in result.history[:number]) / 1e6:.1f}"
        assert lines[-1][:3] == [str(number), "4", f"{100 * record.score('pre'):.2f}"]
    with pytest.raises(ConnectionRefusedError):
        get(page, "/")


def test_several_runs_and_comparisons(tmp_path: Path) -> None:
    how = {"seeds": 1, "rounds": 1, "backend": toy.IN_TURN, "progress": False, "out": tmp_path / "c"}
    coterie.compare(["local", "fedavg"], toy.toy(), toy.network(), over={"lr": [0.1, 0.2]}, **how)
    run(tmp_path / "r", "ditto")
    with LivePage(0, [tmp_path / "c", tmp_path / "r"]) as page:
        body = get(page, "/")[2]
    assert "5 runs: 5 finished." in body
    names = ["Local, lr 0.1", "Local, lr 0.2", "FedAvg, lr 0.1", "FedAvg, lr 0.2", "Ditto"]
    assert sorted(progress(body)) == sorted(names)
    assert "All runs" in body


def test_a_run_that_is_stale_resumed_or_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(out, rounds=4, watch=Interrupter(2))
    followed = FollowedRun(out)
    assert followed.refresh()
    assert not followed.refresh()  # nothing is read twice
    assert (followed.done, followed.planned) == (2, 4)
    assert followed.state() == "running"
    assert followed.state(now=time.time() + 61) == "stale"
    assert followed.seconds_left == pytest.approx(sum(followed.seconds))  # two rounds took that, two are left
    run(out, rounds=4, exist="resume")
    followed.refresh()
    assert list(followed.rounds) == [1, 2, 3, 4]
    assert followed.state(now=time.time() + 10**6) == "finished"
    assert followed.rounds == coterie.load_run(out, toy.network()).rounds
    assert followed.client_table == coterie.load_run(out, toy.network()).client_table
    run(out, rounds=1, exist="replace")
    followed.refresh()
    assert list(followed.rounds) == [1]


def test_stragglers_are_named(tmp_path: Path) -> None:
    """Clients that were left out, in the last round and before."""
    out = tmp_path / "run"
    run(out, rounds=3)
    table = (out / "metrics.csv").read_text().splitlines()
    cells = [line.split(",") for line in table]
    cells[1][2], cells[2][2] = "3 4", "3"
    (out / "metrics.csv").write_text("\n".join(",".join(row) for row in cells[:3]) + "\n3,5,4 half a li")
    (out / "result.json").unlink()
    (out / "checksums.json").unlink()
    with LivePage(0, [out]) as page:
        shown = progress(get(page, "/news")[2])["FedPAC"]
    assert shown[1] == "2 of 3"
    assert shown[5] == "3 (3: 2, 4: 1)"


def test_a_folder_that_is_no_run_or_a_trap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / "none")])
    assert "no such folder" in capsys.readouterr().err
    run(tmp_path / "run", rounds=1)
    (tmp_path / "run" / "clients.csv").unlink()
    (tmp_path / "run" / "clients.csv").symlink_to("/etc/passwd")
    with LivePage(0, [tmp_path]) as page:
        body = get(page, "/")[2]
    assert "is a link, or not a plain file" in body
    assert "root:x:" not in body


def test_the_command_watches_another_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coterie", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout
        port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/", running.stdout.readline())[0])
        run(tmp_path / "run", rounds=1)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/")
        assert "FedPAC: round 1 of 1, finished" in connection.getresponse().read().decode()
        connection.close()
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=30)[1] == ""
        assert running.returncode == 0


def test_another_name_for_this_machine_is_refused() -> None:
    """A page of the web whose name points to 127.0.0.1 must not read it."""
    with LivePage(0) as page:
        assert get(page, "/", Host="evil.example")[0] == 403
        assert get(page, "/", Host=f"localhost:{page.server.server_port}")[0] == 200


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CoterieError, match="choose another port"):
            LivePage(taken.getsockname()[1])
    with pytest.raises(CoterieError, match="65535"):
        LivePage(70000)


def test_the_flag(tmp_path: Path) -> None:
    """The page is there while the command runs, and nothing of it is on the standard output."""
    command = [sys.executable, "-m", "coterie", "run", "local", "--num-clients", "4", "--local-size", "40",
               "--test-size", "20", "--processes", "1", "--model", "linear", "--rounds", "400", "--json",
               "--watch", "0", "--out", str(tmp_path / "r")]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr
        line = running.stderr.readline()
        port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/", line)[0])
        shown = ""
        while "MB so far" not in shown:
            time.sleep(0.05)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/")
            shown = connection.getresponse().read().decode()
            connection.close()
        running.terminate()
        assert running.communicate(timeout=30)[0] == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_the_flag_with_a_port_that_is_taken_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "coterie", "run", "local", "--rounds", "1", "--watch", port, "--out", "r"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2
    assert "choose another port" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
