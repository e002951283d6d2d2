"""A federation of three devices, a server and an MQTT broker, with TLS, as six processes on this machine.

python examples/deploy.py           needs `pip install 'coterie[mqtt]'` and mosquitto (apt-get install mosquitto)

Each device holds its own patients and keeps its personal model. On several machines the commands are the same: give
`coterie certs` the broker's host name with --host, copy ca.pem and a device's two files to it, and name the broker.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import coterie

COTERIE = [sys.executable, "-m", "coterie"]
WARDS = {"ward-a": "0", "ward-b": "1", "ward-c": "2-3"}  # device -> the hospitals of heart-disease that it hosts


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(port: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"the broker does not listen on port {port} after {seconds:g} s")


def federate(folder: Path, rounds: int) -> None:
    broker = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    if broker is None:
        raise SystemExit("mosquitto is not installed: apt-get install mosquitto")
    certs, port = folder / "certs", free_port()

    def tls(name: str) -> list[str]:
        files = ["--ca", certs / "ca.pem", "--cert", certs / f"{name}.pem", "--key", certs / f"{name}.key"]
        return ["--broker", f"127.0.0.1:{port}", *map(str, files)]

    # Certificates, the broker's settings, and rights by which a device speaks under its own name only.
    subprocess.run([*COTERIE, "certs", certs, "--devices", *WARDS, "--port", str(port)], check=True)
    with ExitStack() as started:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = started.enter_context(subprocess.Popen(command))
            started.callback(process.terminate)
            return process

        start(broker, "-c", str(certs / "mosquitto.conf"))
        wait_for(port)
        devices = []
        for ward, clients in WARDS.items():
            data = ["--dataset", "heart-disease", "--clients", clients]  # a device of your own: --dataset ward-a.csv
            devices.append(start(*COTERIE, "join", "--device", ward, "--dir", str(folder / ward), *data, *tls(ward)))
        serve = ["serve", "fedper", "--num-clients", "4", "--rounds", str(rounds), "--out", str(folder / "served")]
        subprocess.run([*COTERIE, *serve, *tls("server")], check=True)
        for device in devices:
            device.wait(timeout=60)  # until its models are written

    for ward in WARDS:  # personal models are on the devices, never on the server
        (path,) = (folder / ward).glob("*/run")
        run = coterie.load_run(path)
        print(f"{ward} has the models of {', '.join(run.client_names)} in {path}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("three-devices"), help="a new folder for everything")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(argv)
    chosen.folder.mkdir(parents=True)
    federate(chosen.folder, chosen.rounds)


if __name__ == "__main__":
    main()
