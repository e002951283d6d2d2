"""One FedPAC round of 20 clients on Fashion-MNIST, ours against a plain loop, alternating in one run.

python -m benchmarks [--repeats 5] [--device cpu] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from coterie.api import load_clients, make_method, make_network
from coterie.clients import Batched, Clients, Looped, Turn
from coterie.clients.base import send
from coterie.clients.looped import cores
from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData


def data() -> FederatedData:
    """The paper's partition, of the whole Fashion-MNIST where it is there, else of the shipped part."""
    try:
        return load_clients("fashion-mnist", num_clients=20)
    except CoterieError:
        return load_clients("fashion-mnist-small", num_clients=20, local_size=600)


def our_round(clients: Clients) -> Callable[[], None]:
    method = clients.method
    server = method.server_init(clients.model, clients.census)
    clients.join(method.server_welcome(server))
    everyone = torch.arange(clients.data.clients)
    state = {"server": server, "round": 0}

    def play() -> None:
        answers = clients.train(everyone, send(method, state["server"], everyone), Turn(state["round"]))
        ids = answers.clients.to(clients.model.mean.device)
        state["server"] = method.server_receive(state["server"], ids, answers.ups)
        state["round"] += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return play


class PlainLoop:
    """The plain loop, in a process of its own."""

    def __enter__(self) -> PlainLoop:
        command = [sys.executable, "-m", "benchmarks.plain"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask, self.answers = cast("IO[str]", self.process.stdin), cast("IO[str]", self.process.stdout)
        if self.answers.readline() != "ready\n":
            sys.exit("the plain loop did not start")
        return self

    def __exit__(self, *reason: object) -> None:
        self.ask.close()
        self.process.wait()

    def round(self) -> float:
        self.ask.write("\n")
        self.ask.flush()
        return float(json.loads(self.answers.readline())["round"])


def timed(play: Callable[[], None]) -> float:
    start = time.perf_counter()
    play()
    return time.perf_counter() - start


def measure(held: FederatedData, device: str, repeats: int) -> dict[str, list[float]]:
    """Name -> seconds of a round, one for each repeat; in a repeat all take their turn."""
    method = make_method("fedpac", momentum=0.5, weight_decay=5e-4)
    model = make_network("cnn", held, seed=0)
    ways: dict[str, Clients] = {}
    if device == "cpu":
        ways[f"looped, {cores()} processes"] = Looped(method, model, held, 0, device, processes=cores())
        ways["looped, 1 process"] = Looped(method, model, held, 0, device, processes=1)
    else:
        ways["batched"] = Batched(method, model, held, 0, device)
    rounds = {name: our_round(clients) for name, clients in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("plain loop", *rounds)}
    with PlainLoop() as plain:
        for play in (plain.round, *rounds.values(), *rounds.values(), *rounds.values()):
            play()  # warm: memory, kernels, graphs
        for _ in range(repeats):
            seconds["plain loop"].append(plain.round())
            for name, play in rounds.items():
                seconds[name].append(timed(play))
    for clients in ways.values():
        clients.close()
    return seconds


def provenance(device: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "workload": "a FedPAC round, 20 clients x 600 samples of Fashion-MNIST, batch 50, 5 + 1 epochs; no evaluation",
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {cores()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of ours; the plain loop stays on one CPU thread")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    chosen = parser.parse_args()
    seconds = measure(data(), chosen.device, chosen.repeats)
    ratios = {
        name: statistics.median(p / ours for p, ours in zip(seconds["plain loop"], values, strict=True))
        for name, values in seconds.items()
    }
    for name, values in seconds.items():
        print(f"{name:24} {statistics.median(values):8.3f} s a round   {ratios[name]:6.2f} times as fast")
    if chosen.out:
        found = {**provenance(chosen.device), "seconds": seconds, "median_ratio_to_plain_loop": ratios}
        chosen.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
