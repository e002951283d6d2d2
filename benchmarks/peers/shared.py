"""What every simulator runs: the same network, start, clients and number of SGD steps. Imports torch only.

Each simulator is a process that answers every line of input with the time of some rounds of FedAvg, in one thread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

SEED, CLASSES, TESTS = 0, 10, 1000


@dataclass(frozen=True)
class SharedWork:
    """FedAvg in which all clients join and have equally many samples."""

    about: str
    shape: tuple[int, ...]
    clients: int
    samples: int  # of a client
    batch: int
    rounds: int  # per measurement
    lr: float

    @property
    def steps(self) -> int:
        """SGD steps of all clients per measurement, with one epoch per round."""
        return self.rounds * self.clients * -(-self.samples // self.batch)

    def network(self) -> nn.Sequential:
        """Always with the same weights; the last layer is the head."""
        torch.manual_seed(SEED)
        if self.shape[0] == 1:
            return nn.Sequential(
                nn.Flatten(), nn.Linear(self.shape[1] * self.shape[2], 64), nn.ReLU(), nn.Linear(64, 10)
            )
        return nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def data(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Training images (uint8) and labels, client after client, and those for testing: noise over a class's grid."""
        draw, (channels, side, _) = torch.Generator().manual_seed(SEED), self.shape
        grids = 128 * torch.randint(0, 2, (CLASSES, channels, 4, 4), generator=draw, dtype=torch.uint8)
        images = grids.repeat_interleave(side // 4, 2).repeat_interleave(side // 4, 3)

        def split(count: int) -> tuple[Tensor, Tensor]:
            y = torch.randint(0, CLASSES, (count,), generator=draw)
            return images[y] + torch.randint(0, 128, (count, *self.shape), generator=draw, dtype=torch.uint8), y

        return *split(self.clients * self.samples), *split(TESTS)

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Every client's samples, scaled to 0..1."""
        x, y, _, _ = self.data()
        return list(zip((x.float() / 255).split(self.samples), y.split(self.samples), strict=True))

    def accuracy(self, answer: Callable[[Tensor], Tensor]) -> float:
        _, _, x, y = self.data()
        with torch.no_grad():
            return float((answer(x.float() / 255).argmax(1) == y).float().mean())


SHARED_WORK = {
    "cnn-20": SharedWork(
        "BlazeFL's CNN on images of 3 x 32 x 32, 20 clients x 500, batch 50", (3, 32, 32), 20, 500, 50, 2, 0.1
    ),
    "mlp-100": SharedWork(
        "784-64-10 units on images of 1 x 28 x 28, 100 clients x 100, batch 10", (1, 28, 28), 100, 100, 10, 3, 0.005
    ),
}


class Simulator(Protocol):
    """How a simulator is driven."""

    def rounds(self, count: int) -> tuple[float, float] | None:
        """Run rounds. Seconds and CPU seconds, if not those of this call."""

    def answer(self, x: Tensor) -> Tensor:
        """The logits of the global model."""


def serve(make: Callable[[SharedWork], Simulator]) -> None:
    """Answer every line of input. What simulators print goes to the error stream."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # also for the processes that it starts
        torch.set_num_threads(1)
        work = SHARED_WORK[sys.argv[1]]
        simulator = make(work)
        for _ in sys.stdin:
            start, cpu = time.perf_counter(), cpu_seconds()
            own = simulator.rounds(work.rounds)
            seconds, used = own or (time.perf_counter() - start, cpu_seconds() - cpu)
            found = {"seconds": seconds, "cpu_seconds": used, "accuracy": work.accuracy(simulator.answer)}
            print(json.dumps(found), file=out, flush=True)


def cpu_seconds(root: int | None = None) -> float:
    """CPU time of a process, by default this one, and of all processes that it has started and that still run."""
    parents, times = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            values = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        parents[int(folder.name)] = int(values[1])
        times[int(folder.name)] = (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
    found, family = 0.0, [root or os.getpid()]
    while family:
        own = family.pop()
        found += times.get(own, 0.0)
        family += [child for child, parent in parents.items() if parent == own]
    return found
