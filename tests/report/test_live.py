"""The page that is served while a run goes on: as a program on this machine meets it."""

from __future__ import annotations

import html
import http.client
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.core.errors import CoterieError
from coterie.federation import Settings, federate
from coterie.report import live
from coterie.report.live import LivePage
from tests import toy

pytestmark = pytest.mark.network


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0.0)


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


def test_rounds_are_shown_as_they_end() -> None:
    m, net = toy.method("fedpac"), toy.model()
    clients = toy.Looped(m, net, toy.toy(), 7)
    with LivePage(0) as page:
        page.begin("FedPAC", 2, 0)
        seen = []

        def watch(record: toy.Any) -> None:
            page(record)
            _, version, body = get(page, "/news")
            assert get(page, "/news", **{"If-None-Match": version})[0] == 304  # nothing new
            seen.append((100 * record.score("pre"), numbers(body)[-1]))

        federate(clients, Settings(rounds=2), watch)
        status, _, whole = get(page, "/")
        assert status == 200
        assert "FedPAC: round 2 of 2" in whole
        assert "connect-src 'self'" in html.unescape(whole)
        assert "<svg" in whole
        assert get(page, "/etc/passwd")[0] == 404
    for number, (accuracy, line) in enumerate(seen, 1):
        assert line[0] == str(number)
        assert line[2] == f"{accuracy:.2f}"
    with pytest.raises(ConnectionRefusedError):
        get(page, "/")


def test_several_runs_come_one_after_the_other() -> None:
    with LivePage(0) as page:
        for name in ("local", "fedavg"):
            page.begin(name, 1, 0)
            federate(toy.Looped(toy.method(name), toy.model(), toy.toy(), 7), Settings(rounds=1), page)
        assert "All runs" in get(page, "/")[2]


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
    command = [sys.executable, "-m", "coterie.cli", "run", "local", "--num-clients", "4", "--local-size", "40",
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
        command = [sys.executable, "-m", "coterie.cli", "run", "local", "--rounds", "1", "--watch", port, "--out", "r"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2
    assert "choose another port" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
