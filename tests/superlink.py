"""A real SuperLink with TLS and node authentication, its SuperNodes, and runs on them; all on 127.0.0.1."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.deploy.certs import make
from coterie.deploy.transports.flower.connection import QUIET

BIN = Path(sys.executable).parent


class SuperLink:
    """nodes: the node config of each."""

    def __init__(self, folder: Path, nodes: list[Mapping[str, Any]]) -> None:
        self.folder, self.nodes, self.port = folder, nodes, free_port()
        self.env = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "home"), "OMP_WAIT_POLICY": "passive"}
        self.env["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        home, keys = self.folder / "home", self.folder / "keys"
        for path in (home, keys):
            path.mkdir(parents=True)
        make(keys, "ca", None, (), 1)
        make(keys, "superlink", keys, ("127.0.0.1", "localhost"), 1)
        profile = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{keys / "ca.pem"}"\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{profile}')
        tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "superlink.pem", "--ssl-keyfile", "superlink.key"]
        tls = [str(keys / word) if "." in word else word for word in tls]
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        self._spawn("superlink", ["flower-superlink", *tls, *place, "--enable-supernode-auth"])
        until(lambda: reachable(self.port), 120, "the SuperLink does not listen")
        for number in range(len(self.nodes)):
            make_node_key(keys / f"node-{number}")
            self.flwr("supernode", "register", str(keys / f"node-{number}.pub"), "here")
            self.start_node(number)

    def start_node(self, number: int) -> None:
        keys, config = self.folder / "keys", self.nodes[number]
        told = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        command = ["flower-supernode", "--root-certificates", str(keys / "ca.pem")]
        command += ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        command += ["--auth-supernode-private-key", str(keys / f"node-{number}"), "--node-config", told]
        self._spawn(f"node-{number}", command)

    def stop(self, name: str) -> None:
        """As if it lost power."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def submit(self, app: Path, **config: Any) -> str:
        """The number of a run that was started."""
        told = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items())
        answer = self.flwr("run", str(app), "here", *(["--run-config", told] if told else []), "--format", "json")
        found = re.search(r'"run-id": "?(\d+)', answer)
        assert found, answer
        return found[1]

    def wait(self, run: str, sign: Path | None = None, seconds: float = 1800) -> str:
        """How the run ended. sign: what is there shortly before; asking Flower takes a process each time."""
        until(lambda: sign is None or sign.exists(), seconds, f"{sign} does not come: {self.said('superlink')[-3000:]}")
        status = ""

        def ended() -> bool:
            nonlocal status
            status = self.status(run)
            return status.startswith("finished")

        until(ended, seconds, f"run {run} does not end: {self.said('superlink')[-3000:]}", pause=10)
        return status

    def status(self, run: str) -> str:
        found = re.search(r'"status": "([\w:]+)', self.flwr("list", "here", "--run-id", run, "--format", "json"))
        return found[1] if found else ""

    def flwr(self, *words: str) -> str:
        done = subprocess.run([BIN / "flwr", *words], env=self.env, capture_output=True, timeout=300, cwd=self.folder)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        return done.stdout.decode()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for name in list(self.running):
            self.running[name].terminate()
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def _spawn(self, name: str, command: list[str]) -> None:
        command[0] = str(BIN / command[0])
        with (self.folder / f"{name}.log").open("ab") as file:
            self.running[name] = subprocess.Popen(command, env=self.env, stdout=file, stderr=file, cwd=self.folder)


@contextmanager
def superlink(folder: Path, nodes: list[Mapping[str, Any]]) -> Iterator[SuperLink]:
    link = SuperLink(folder, nodes)
    try:
        link.start()
        yield link
    finally:
        link.close()


def make_node_key(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    path.touch(0o600)
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(done: Any, seconds: float, otherwise: str, pause: float = 0.5) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise AssertionError(otherwise)
        time.sleep(pause)
