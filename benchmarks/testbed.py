"""FedReG's testbed (section 5, Table 6): thirty clients on ten devices, three on each, over MQTT.

python -m benchmarks.testbed [METHOD ...] [--rounds 100] [--seed 0] [--data-dir FOLDER] [--out FOLDER]

A broker, a server and ten devices run as processes of their own on this machine, with the settings of the paper:
Fashion-MNIST, Dirichlet 0.1, ConvNet, a fifth of the clients in every round. Then the same federation runs as a
simulation in one process, and the program fails unless the server's weights and every score of every client are the
same. G is the accuracy of the global model on the test samples of all clients. P is measured as on the paper's testbed:
each client tests the model that it trained last. Both count every sample the same.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.machine import provenance

PUBLISHED = {  # Table 6, percent: G, P
    "fedavg": (82.13, 98.05),
    "fedprox": (81.18, 98.05),
    "feddyn": (83.68, 97.75),
    "gpfl": (48.30, 97.46),
    "ditto": (81.41, 97.65),
    "fedper": (72.27, 98.29),
    "fedrep": (59.75, 97.88),
    "fedbabu": (78.73, 97.76),
    "fedrod": (83.96, 98.01),
    "fedreg": (86.12, 98.25),
}
DEVICES, CLIENTS = 10, 30
RESULTS = Path("benchmarks/results/testbed")
BROKER = "listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"
PROGRAM = (sys.executable, "-m", "coterie")
Row = dict[str, str]


class Round(NamedTuple):
    """Accuracies of a round, between 0 and 1."""

    number: int
    global_model: float  # G
    last_trained: float  # P, over the clients that have trained
    trained: int  # number of those clients


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=["fedreg"], help="default: fedreg")
    parser.add_argument("--rounds", type=int, default=100, help="default: 100")
    parser.add_argument("--seed", type=int, default=0, help="of training and partition; default: 0")
    parser.add_argument("--data-dir", help="folder with Fashion-MNIST; default: as for `coterie run`")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder for the results; default: {RESULTS}")
    return parser


def data_flags(chosen: argparse.Namespace) -> list[str]:
    folder = ["--data-dir", str(Path(chosen.data_dir).resolve())] if chosen.data_dir else []
    return ["--dataset", "fashion-mnist", "--protocol", "reg", "--num-clients", str(CLIENTS), *folder,
            "--partition-seed", str(chosen.seed)]  # fmt: skip


def served(method: str, chosen: argparse.Namespace, folder: Path) -> None:
    """Run the federation of processes in this folder; its run folder is `served`."""
    broker = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if broker is None:
        sys.exit("testbed: mosquitto is not installed")
    port, each = free_port(), CLIENTS // DEVICES
    (folder / "broker.conf").write_text(BROKER.format(port=port))
    at, environment = ["--broker", f"127.0.0.1:{port}"], {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        def begin(name: str, *command: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        begin("broker", broker, "-c", "broker.conf")
        wait_for_port(port)
        for number in range(DEVICES):
            name, clients = f"device-{number}", f"{each * number}-{each * (number + 1) - 1}"
            begin(name, *PROGRAM, "join", "--device", name, "--clients", clients, "--dir", name, *at,
                  *data_flags(chosen))  # fmt: skip
        terms = ["--protocol", "reg", "--num-clients", str(CLIENTS), "--out", "served"]
        length = ["--rounds", str(chosen.rounds), "--seed", str(chosen.seed)]
        server = begin("server", *PROGRAM, "serve", method, *terms, *length, *at)
        if server.wait():
            sys.exit(f"testbed: the server failed:\n{(folder / 'server.log').read_text()}")


def simulated(method: str, chosen: argparse.Namespace, folder: Path) -> None:
    """The same federation in one process; its run folder is `run`."""
    how = ["--backend", "looped", "--processes", "1", "--rounds", str(chosen.rounds), "--seed", str(chosen.seed)]
    command = [*PROGRAM, "run", method, *data_flags(chosen), *how, "--out", "run", "--no-keep-state"]
    log = folder / "run.log"
    with log.open("wb") as file:
        if subprocess.run(command, cwd=folder, stdout=file, stderr=file, check=False).returncode:
            sys.exit(f"testbed: the simulation failed:\n{log.read_text()}")


def compare(folder: Path) -> None:
    """Stop unless both runs have the same weights and the same scores."""
    ours, theirs = ((folder / run / "models" / "server.safetensors").read_bytes() for run in ("served", "run"))
    if ours != theirs:
        sys.exit("testbed: the server's weights differ from the simulation's")
    if rows(folder / "served" / "clients.csv") != rows(folder / "run" / "clients.csv"):
        sys.exit("testbed: scores of clients differ from the simulation's")


def rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def accuracies(scores: Sequence[Row], rounds: int) -> list[Round]:
    """G and P of every round, from clients.csv."""
    last: dict[str, tuple[int, int]] = {}  # client -> correct and all samples, of the model that it trained last
    found = []
    for number in range(1, rounds + 1):
        now = [row for row in scores if row["round"] == str(number) and row["split"] == "test"]
        last |= {row["client"]: counted(row) for row in now if row["point"] == "post"}
        everyone = [counted(row) for row in now if row["point"] == "global"]
        found.append(Round(number, share(everyone), share(last.values()), len(last)))
    return found


def counted(row: Row) -> tuple[int, int]:
    return int(row["correct"]), int(row["total"])


def share(counts: Any) -> float:
    """Correct of all samples; NaN if there are none."""
    correct, total = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return correct / total if total else float("nan")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for_port(port: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while True:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > end:
            sys.exit("testbed: the broker did not start")
        time.sleep(0.05)


def main() -> None:
    chosen = flags().parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for method in chosen.methods:
        if method not in PUBLISHED:
            sys.exit(f"testbed: Table 6 has no {method}; it has {', '.join(PUBLISHED)}")
        with TemporaryDirectory() as made:
            folder, start = Path(made), time.monotonic()
            served(method, chosen, folder)
            seconds = time.monotonic() - start
            simulated(method, chosen, folder)
            compare(folder)
            found = accuracies(rows(folder / "served" / "clients.csv"), chosen.rounds)
            traffic = next(line for line in (folder / "server.log").read_text().splitlines() if "traffic:" in line)
        result = {
            "method": method,
            "published": dict(zip("GP", PUBLISHED[method], strict=True)),
            "rounds": [r._asdict() for r in found],
            "seed": chosen.seed,
            "equal_to_the_simulation": True,  # otherwise `compare` has stopped the program
            "seconds": round(seconds),
            "traffic": traffic,
            **provenance("cpu"),
        }
        (chosen.out / f"{method}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        best = max(found, key=lambda r: r.global_model)
        print(
            f"{method}: G {100 * found[-1].global_model:.2f} (best {100 * best.global_model:.2f}), "
            f"P {100 * found[-1].last_trained:.2f} of {found[-1].trained} clients after {chosen.rounds} rounds; "
            f"published {PUBLISHED[method][0]} and {PUBLISHED[method][1]}; equal to the simulation; {traffic}",
            flush=True,
        )


if __name__ == "__main__":
    main()
