"""A federation of real processes on this machine: a broker, a server, devices; and its simulation in one process."""

from __future__ import annotations

import csv
import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from coterie.api import About, choose, load_clients, make_network
from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.execution import Looped
from coterie.execution.answers import Returned
from coterie.execution.requests import Turn
from coterie.federation import federate
from coterie.runs.model_files import plain

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
DATA = {"num_clients": 6, "local_size": 30, "test_size": 20}
HELD = {"one": "0,3", "two": "1", "three": "2,4-5"}  # device -> its clients
OPEN = "listener {port} {host}\nallow_anonymous true\nmax_queued_messages 0\nuser root\n"
FAST = ("--deadline", "60", "--grace", "5", "--wait", "60")


class Mosquitto:
    """A broker on 127.0.0.1 that keeps nothing when it is killed."""

    def __init__(self, folder: Path, settings: str = OPEN, port: int = 0, host: str = "127.0.0.1") -> None:
        assert MOSQUITTO
        self.port, self.host = port or free_port(), host
        self.file, self.log = folder / "broker.conf", folder / "broker.log"
        self.file.write_text(settings.format(port=self.port, host=host))
        self.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            said = log.tell()
            self.process = subprocess.Popen([str(MOSQUITTO), "-v", "-c", str(self.file)], stdout=log, stderr=log)

        def runs() -> bool:  # it says so itself: somebody else may answer at its port
            return b" running" in self.log.read_bytes()[said:] and answers(self.host, self.port)

        try:
            wait_until(lambda: runs() or self.process.poll() is not None, "the broker", 20)
            assert self.process.poll() is None, self.log.read_text()
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Machine:
    """`coterie ...` in a process of its own, forked from one that has imported everything."""

    def __init__(
        self, log: Path, arguments: tuple[str, ...], protocol: int | None = None, network: str | None = None
    ) -> None:
        """protocol: which it speaks. network: the network namespace that it lives in."""
        self.log = log
        log.touch()
        self.process = nursery().Process(target=command, args=(str(log), arguments, protocol, network), daemon=True)
        self.process.start()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = 90) -> None:
        wait_until(lambda: words in self.said or not self.process.is_alive(), f"'{words}' in {self.log}", seconds)
        assert words in self.said, self.said

    def signal(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join()

    def end(self, seconds: float = 120) -> int:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running: {self.said}"
        return self.process.exitcode

    @property
    def memory(self) -> int:
        """Bytes that it takes now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Machines:
    """All of one federation, gone when it is closed."""

    def __init__(self, folder: Path, settings: str = OPEN, port: int = 0, host: str = "127.0.0.1") -> None:
        self.folder, self.all = folder, list[Machine]()
        self.broker = Mosquitto(folder, settings, port, host)
        self.at = ("--broker", self.broker.address)
        self.out = folder / "served"

    def serve(self, method: str, *more: str, clients: int = 6, **how: Any) -> Machine:
        given = ("--num-clients", str(clients), "--model", "linear", "--out", str(self.out), *self.at, *FAST)
        return self._start("server", ("serve", method, *given, *more), **how)

    def join(self, device: str, clients: str, *more: str, data: tuple[str, ...] = (), **how: Any) -> Machine:
        samples = data or tuple(f"--{name.replace('_', '-')}={value}" for name, value in DATA.items())
        given = ("--device", device, "--clients", clients, "--dir", str(self.folder / device), *self.at)
        return self._start(device, ("join", *given, *samples, *more), **how)

    def join_all(self, held: dict[str, str] = HELD, *more: str) -> dict[str, Machine]:
        return {device: self.join(device, clients, *more) for device, clients in held.items()}

    def _start(self, name: str, arguments: tuple[str, ...], **how: Any) -> Machine:
        count = sum(machine.log.name.startswith(f"{name}-") for machine in self.all)
        self.all.append(Machine(self.folder / f"{name}-{count}.log", arguments, **how))
        return self.all[-1]

    def close(self) -> None:
        for machine in self.all:
            machine.kill()
        self.broker.kill()

    @property
    def rounds(self) -> list[dict[str, str]]:
        """What metrics.csv says of each round."""
        path = self.out / "metrics.csv"
        return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []

    @property
    def left_out(self) -> dict[int, set[int]]:
        """Round 0, 1, ... -> who did not answer."""
        return {int(row["round"]) - 1: set(map(int, row["left_out"].split())) for row in self.rounds}

    def personal(self, device: str) -> Path:
        """The run that a device has left."""
        (found,) = (self.folder / device).glob("*/run")
        return found


def tls(machines: Machines, name: str, folder: str = "certs") -> tuple[str, ...]:
    """Flags of whoever has the certificate of this name."""
    own, ca = machines.folder / folder, machines.folder / "certs" / "ca.pem"
    return ("--ca", str(ca), "--cert", str(own / f"{name}.pem"), "--key", str(own / f"{name}.key"))


def command(log: str, arguments: tuple[str, ...], protocol: int | None, network: str | None) -> None:
    """In the new process: the command line, its output in a file."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.setsid()
    if network is not None:
        with open(f"/run/netns/{network}") as space:
            assert ctypes.CDLL(None).setns(space.fileno(), 0) == 0
    if protocol is not None:
        from coterie.deploy import handshake

        for kind in (handshake.Hello, handshake.Terms):
            kind.__init__.__defaults__ = tuple(  # type: ignore[misc]
                protocol if value == handshake.PROTOCOL and value is not True else value
                for value in kind.__init__.__defaults__ or ()  # type: ignore[misc]
            )
        handshake.PROTOCOL = protocol
    from coterie.cli import main

    main(arguments)


@cache
def nursery() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.machines", "coterie.deploy.transports.mqtt.device", "coterie.deploy.server",
                                    "coterie.cli.deploy", "coterie.cli.train", "paho.mqtt.client"])  # fmt: skip
    return context


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(host: str, port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex((host, port)) == 0


def wait_until(ready: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)


# The same without a network.


class Missing(Looped):
    """Clients of one process, of whom some do not answer in some rounds."""

    left_out: dict[int, set[int]] = {}  # round -> clients  # noqa: RUF012

    def begin(self, clients: torch.Tensor, downs: Any, turn: Turn) -> Returned:
        out = self.left_out.get(turn.round, set())
        there = torch.tensor([i not in out for i in clients.tolist()])
        found = super().begin(clients[there], tree.pick(downs, there.nonzero()[:, 0]), turn)
        return found._replace(silent=tuple(clients[~there].tolist()))

    def score_trained(self, downs: Any, returned: Returned, split: str) -> Any:
        asked = sorted((*returned.clients.tolist(), *returned.silent))
        rows = torch.tensor([asked.index(i) for i in returned.clients.tolist()])
        return super().score_trained(tree.pick(downs, rows), returned, split)


@cache
def samples() -> FederatedData:
    return load_clients(**DATA)  # type: ignore[arg-type]


def simulated(
    method: str, left_out: dict[int, set[int]] | None = None, data: FederatedData | None = None, **settings: Any
) -> tree.Tree:
    """The server's state after `coterie run` with these settings, if these clients do not answer in these rounds."""
    data = data or samples()
    made, federation, _, _ = choose(method, "pac", About(data.name, data.shape, data.num_clients), settings)
    clients = Missing(made, make_network("linear", data, federation.seed), data, federation.seed, processes=1)
    clients.left_out = left_out or {}
    server, _ = federate(clients, federation, max_left_out=1.0)
    return plain(tree.flatten(server))


def assert_same_server(out: Path, expected: tree.Tree) -> None:
    """To the last bit."""
    found = load_file(out / "models" / "server.safetensors")
    assert found.keys() == expected.keys()
    for name in found:
        assert save({"t": found[name]}) == save({"t": expected[name].contiguous()}), name


class Tiny(nn.Sequential):
    """A network of somebody's own."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10))
