"""Sweeps: the cost of a FedPAC round as one setting varies and all others stay fixed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.machine import peak_memory
from benchmarks.neighbour import Neighbour
from benchmarks.ours import Case, Federation, alternate
from benchmarks.workloads import WORKLOADS, Workload, data
from coterie.api import Execution

POINTS: dict[str, tuple[float, ...]] = {
    "clients": (5, 10, 20, 40, 80, 160),
    "samples": (50, 100, 200, 400, 800, 1600),
    "width": (0.5, 1, 2, 4),
}
NAMES = {"clients": "clients, all in each round", "samples": "samples per client", "width": "network width"}


def base(device: str) -> Workload:
    """One local epoch, to keep the points short; on a CPU also fewer samples."""
    if device == "cpu":
        return replace(WORKLOADS["fmnist-20"], name="sweep", samples=200, tests=50, epochs=1)
    return replace(WORKLOADS["cifar-20"], name="sweep", tests=50, epochs=1)


def varied(w: Workload, what: str, value: float) -> Workload:
    if what == "clients":
        return replace(w, clients=int(value), joining=int(value))
    return replace(w, samples=int(value)) if what == "samples" else replace(w, width=value)


def sweep(what: str, w: Workload, how: Execution, repeats: int, few: bool = False) -> dict[str, Any]:
    """few: only the first two points."""
    values = POINTS[what][:2] if few else POINTS[what]
    return {
        "about": w.about,
        "across": NAMES[what],
        "points": [{"value": v, **point(varied(w, what, v), how, repeats)} for v in values],
    }


def point(w: Workload, how: Execution, repeats: int) -> dict[str, Any]:
    case = Case(w, data(w), how, repeats)
    with Neighbour("plain", w.written(), how.device) as plain, closing(case.clients()) as clients:
        turns = alternate(Federation(clients, w.joining), plain, case)
        memory = peak_memory(how.device)
    return {
        "seconds": median(turns.ours),
        "plain_seconds": median(p["round"] for p in turns.plain),
        "cpu_seconds": median(turns.cpu),
        "plain_cpu_seconds": median(p["cpu"] for p in turns.plain),
        "memory_gb": memory,
    }
