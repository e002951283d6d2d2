"""Clients on Ray: the same numbers, workers that die, clusters that are not there, nothing that leaves the machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.execution import Ray
from coterie.execution import ray as cluster
from tests import toy

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """One cluster on this machine for all tests."""
    assert cluster.start(None, 2)
    yield cluster.ray()
    cluster.ray().shutdown()


def on_ray(method: AnyMethod, **settings: Any) -> tuple[Any, Any]:
    return toy.outcome(Ray(method, toy.model(), toy.toy(), settings.get("seed", 7), workers=2), **settings)


@pytest.mark.parametrize("name", ["fedavg", "fedpac", "ditto"])
def test_the_same_as_in_one_process(name: str) -> None:
    """To the last bit, over three rounds with three of five clients in each, and after the end."""
    expected, history = toy.looped(toy.method(name), toy.model(), toy.toy())
    found, elsewhere = on_ray(toy.method(name))
    toy.assert_same(expected, found)
    for a, b in zip(history, elsewhere, strict=True):
        assert {k: toy.rows(s) for k, s in a.scores.items()} == {k: toy.rows(s) for k, s in b.scores.items()}
        assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)


def test_stacked_as_in_one_process() -> None:
    """As workers with a GPU compute: the cohorts are those of stacked clients, and so is every bit."""
    method, model, data = toy.method("fedper"), toy.model(torch.float32), toy.toy(train=(16, 24, 8, 24, 16))
    clients = Ray(method, model, data, 7, workers=1, cohort=2)
    clients.stacked = True
    clients._replace(clients.workers[0])
    found, _ = toy.outcome(clients)
    toy.assert_same(toy.stacked(method, model, data, cohort=2)[0], found)


def fragile(marker: Path, once: bool) -> AnyMethod:
    """FedPer, but the process in which client 3 trains is killed."""
    plain = type(toy.method("fedper"))

    class Fragile(plain):  # type: ignore[misc, valid-type]
        def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
            if len(data.y) == 31 and not (once and marker.exists()):
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().client_train(model, state, down, data)

    return Fragile(train=toy.method("fedper").train)


def test_a_worker_that_dies_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of a round. Its part is computed again, and nothing else changes."""
    marker = tmp_path / "killed"
    clients = Ray(fragile(marker, once=True), toy.model(), toy.toy(), 7, workers=2)
    first = list(clients.workers)
    found, _ = toy.outcome(clients)
    assert marker.exists()
    assert "a Ray worker died at the train of client 3" in caplog.text
    assert len({*first} - {*clients.workers}) >= 1
    toy.assert_same(toy.looped(toy.method("fedper"), toy.model(), toy.toy())[0], found)


def test_a_client_that_kills_every_worker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "TRIES", 2)
    clients = Ray(fragile(tmp_path / "killed", once=False), toy.model(), toy.toy(), 7, workers=1)
    with pytest.raises(CoterieError, match=r"2 workers died one after the other at the train of client 3 \("):
        toy.outcome(clients, join_ratio=1.0)
    clients.close()


def test_the_error_of_a_client_is_its_own() -> None:
    class Fails(type(toy.method("fedavg"))):  # type: ignore[misc]
        def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
            if len(data.y) == 31:  # client 3
                raise ValueError("boom")
            return super().client_train(model, state, down, data)

    clients = Ray(Fails(), toy.model(), toy.toy(), 7, workers=1)
    with pytest.raises(CoterieError, match=r"client 3 in train, round 0: ValueError: boom"):
        toy.outcome(clients, join_ratio=1.0)
    clients.close()


def test_a_cluster_of_others_is_left_running(ray: Any) -> None:
    """This one was started before the clients came, so it stays when they go."""
    with pytest.raises(CoterieError, match="99 workers requested, but the cluster has 2"):
        Ray(toy.method("fedavg"), toy.model(), toy.toy(), 7, workers=99)
    assert ray.is_initialized()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_other_machine_is_spoken_to() -> None:
    """All sockets of the cluster's processes, the children of this one, are on the loopback interface."""
    ours = {os.getpid()}
    parents = {int(p.name): int(stat(p)[1]) for p in Path("/proc").iterdir() if p.name.isdecimal() and stat(p)}
    for _ in range(5):
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    sockets = {target(fd) for pid in ours for fd in files(Path(f"/proc/{pid}/fd"))}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].rpartition(":")[0])
    assert len(found) > 5
    assert {here[-8:] for here in found} == {"0100007F"}  # 127.0.0.1, or the same as an IPv6 address


def stat(process: Path) -> list[str]:
    """State and parent first."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""


def test_a_cluster_that_is_not_there_is_told_soon() -> None:
    command = [sys.executable, "-m", "coterie", "run", "fedavg", "--backend", "ray", "--ray-address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "coterie: no Ray cluster answers at 127.0.0.1:1: " in done.stderr
    assert "Traceback" not in done.stderr
    begin = time.monotonic()
    with pytest.raises(CoterieError, match="no Ray cluster answers"):
        cluster.knock("127.0.0.1:1")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request", b"SSH"])
def test_who_answers_there_must_be_ray(answer: bytes, ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who says nothing, or the wrong thing. Our own cluster is recognised."""
    cluster.knock(ray.get_runtime_context().gcs_address)
    monkeypatch.setattr(cluster, "KNOCK", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        thread = threading.Thread(target=lambda: lines.append(greet(stranger, answer)))
        lines: list[socket.socket] = []
        thread.start()
        with pytest.raises(CoterieError, match="is not a Ray cluster" if answer else "no Ray cluster answers"):
            cluster.knock(address)
        thread.join()
        lines[0].close()


def greet(stranger: socket.socket, answer: bytes) -> socket.socket:
    line, _ = stranger.accept()
    line.sendall(answer)
    return line


@pytest.mark.parametrize("address", ["somewhere", "host:", ":6379", "host:port"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(CoterieError, match="is not an address of a Ray cluster"):
        cluster.knock(address)


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[ray\]'"):
        cluster.ray()


def test_the_environment_is_as_before() -> None:
    os.environ.pop("http_proxy", None)
    with cluster.environment(cluster.QUIET):
        assert os.environ["http_proxy"] == cluster.NOWHERE
    assert "http_proxy" not in os.environ


def test_what_all_have_alike_is_not_copied_on_the_way() -> None:
    same = torch.ones(2).expand(3, 2)
    moved = cluster.moved({"same": same, "own": torch.ones(3, 2)}, torch.device("cpu"))
    assert moved["same"].stride(0) == 0
