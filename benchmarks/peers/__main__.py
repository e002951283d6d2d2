"""Run rounds of FedAvg in other simulators and in Coterie, in turn on the same core, and compare their time.

python -m benchmarks.peers FOLDER --install   make an environment for each simulator in FOLDER
python -m benchmarks.peers FOLDER             measure, and write benchmarks/results/peers.json

All have the same network, first weights, clients, samples and number of SGD steps, one thread, and no evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from benchmarks.machine import load, provenance
from benchmarks.peers.shared import SHARED_WORK
from coterie.core.errors import CoterieError

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"


class Peer(NamedTuple):
    module: str
    package: str = ""  # "": runs in this environment
    requirements: tuple[str, ...] = ()
    python: str = "python3"


PEERS = {
    "Coterie": Peer("coterie_fedavg"),
    "plain loop": Peer("plain_fedavg"),
    "BlazeFL": Peer("blazefl_fedavg", "blazefl", ("blazefl==2.0.3", "tqdm", "numpy"), "python3.12"),
    "Flower": Peer("flower_fedavg", "flwr", ("flwr[simulation]==1.41.0", "torch")),
    "fluke": Peer("fluke_fedavg", "fluke-fl", ("fluke-fl==0.8.1",)),
    "pfl-research": Peer("pfl_fedavg", "pfl", ("pfl[pytorch]==0.6.0",)),
}
VERSIONS = """
import importlib.metadata, platform, sys, torch
own = importlib.metadata.version(sys.argv[1]) if sys.argv[1] else ""
print(own, torch.__version__, platform.python_version(), sep=",")
"""


def install(folder: Path) -> None:
    """An environment for each simulator, with the torch of constraints.txt."""
    for name, peer in PEERS.items():
        place = folder / (peer.package or ".")
        if not peer.package or (place / "installed").exists():
            continue
        pip = [place / "bin" / "pip", "install", "--constraint", ROOT / "constraints.txt", *peer.requirements]
        for command in ([peer.python, "-m", "venv", place], pip):
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                print(f"{name} cannot be installed: {last_line(made.stderr)}", file=sys.stderr)
                break
        else:
            (place / "installed").touch()


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def python_of(folder: Path, peer: Peer) -> str:
    return str(folder / peer.package / "bin" / "python") if peer.package else sys.executable


def versions(folder: Path, peer: Peer) -> dict[str, str]:
    command = [python_of(folder, peer), "-c", VERSIONS, peer.package]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(",")
    except (OSError, subprocess.CalledProcessError) as error:
        raise CoterieError(f"{peer.package} is not installed in {folder}; run with --install first") from error
    return dict(zip(("version", "torch", "python"), found, strict=True))


@contextmanager
def running(folder: Path, peer: Peer, work: str) -> Iterator[subprocess.Popen[str]]:
    """The process of a simulator."""
    own = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [python_of(folder, peer), "-m", f"benchmarks.peers.{peer.module}", work]
    log = folder / f"{peer.module}.log"
    with (
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            env=os.environ | own,
        ) as process,
    ):  # fmt: skip
        yield process


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    stdin, stdout = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
    stdin.write("\n")
    stdin.flush()
    line = stdout.readline()
    if not line:
        raise CoterieError(f"{' '.join(map(str, cast(list[str], process.args)))} ended; its log says why")
    return cast("dict[str, Any]", json.loads(line))


def measure(folder: Path, name: str, repeats: int, origin: dict[str, Any]) -> dict[str, Any]:
    """Time of every simulator, in turn; the first turn is not counted. origin: provenance."""
    work, before = SHARED_WORK[name], load()
    found: dict[str, dict[str, Any]] = {n: versions(folder, peer) for n, peer in PEERS.items()}
    with ExitStack() as stack:
        processes = {n: stack.enter_context(running(folder, peer, name)) for n, peer in PEERS.items()}
        for turn in range(-1, repeats):
            for simulator, process in processes.items():
                answer = ask(process)
                print(f"{name}, {simulator}: {answer['cpu_seconds']:.2f} s", file=sys.stderr, flush=True)
                for key, value in answer.items():
                    if turn >= 0:
                        found[simulator].setdefault(key, []).append(round(value, 4))
        for process in processes.values():
            cast("IO[str]", process.stdin).close()
    about = {"about": work.about, "rounds": work.rounds, "steps": work.steps}
    return {**origin, **about, "load": [before, load()], "simulators": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with the environments of the simulators")
    parser.add_argument("--install", action="store_true", help="make the environments")
    parser.add_argument("--workloads", default=",".join(SHARED_WORK), help=f"comma-separated: {', '.join(SHARED_WORK)}")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each simulator (default: 3)")
    chosen = parser.parse_args()
    folder: Path = chosen.folder.resolve()
    if chosen.install:
        install(folder)
        return
    origin = provenance("cpu")  # before results are written, which are part of the repository
    try:
        for name in chosen.workloads.split(","):
            content = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            content[name] = measure(folder, name, chosen.repeats, origin)
            RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except CoterieError as error:
        sys.exit(f"peers: {error}")


if __name__ == "__main__":
    main()
