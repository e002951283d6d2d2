"""Measurements as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

Entry = dict[str, Any]

NOTES = """\
All values are medians. *Statistics* is the clients' part of the same rounds without SGD steps (0 epochs, also for
FedPAC's head), timed in the same run; *training* is the rest of the clients' part, *overhead* the rest of the round.
These five are measured in rounds in which every phase waits for the device; the round without evaluation does not wait.
The plain loop does not evaluate, solve quadratic programs or augment images. *CPU time* is the sum over all processes
in the round without evaluation. *Floor* is the larger of operations / peak and bytes / bandwidth of the SGD steps, with
float32 in memory, at the rates measured in the same run."""


def table(entry: Entry) -> str:
    """One column per execution of a workload."""
    columns = [column(entry, way, found) for way, found in entry["ways"].items()]
    names = [name for name in columns[0] if any(c.get(name, "-") != "-" for c in columns)]
    rows = [[name, *(c.get(name, "-") for c in columns)] for name in names]
    return markdown(rows)


def column(entry: Entry, way: str, found: Entry) -> dict[str, str]:
    parts, floor, step = found["parts"], entry["floor_ms"], found["step_ms"]
    return {
        "": way,
        "round with evaluation, s": number(found["with_evaluation"]),
        "· statistics": number(parts["statistics"]),
        "· training": number(parts["training"]),
        "· aggregation and QP": number(parts["aggregation"]),
        "· evaluation": number(parts["evaluation"]),
        "· overhead": number(parts["overhead"]),
        "round without evaluation, s": number(median(found["seconds"])),
        "plain loop, s": number(median(found["plain_seconds"])),
        "**speedup**": f"**{found['times_as_fast']:.1f}×**",
        "CPU time, s": number(median(found["cpu_seconds"])),
        "plain loop's CPU time, s": number(median(found["plain_cpu_seconds"])),
        "SGD step of all clients, ms": number(step),
        "plain loop's step, ms": number(found["plain_step_ms"]),
        "speedup of a step": f"{found['plain_step_ms'] / step:.1f}×",
        f"floor at {', '.join(floor)}, ms": ", ".join(number(f) for f in floor.values()),
        "step / floor": ", ".join(f"{step / f:.1f}" for f in floor.values()),
        "padding steps": "-" if found["wasted"] is None else f"{100 * found['wasted']:.1f} %",
        **{f"memory {kind}, GB": number(amount) for kind, amount in found["memory_gb"].items()},
    }


def runs(entries: Iterable[Entry]) -> str:
    """Whole runs, one line each."""
    rows = [
        ["workload", "execution", "rounds", "whole run, s", "first round, s", "median round, s", "reserved memory, GB"]
    ]
    for entry in entries:
        memory = entry["memory_gb"]
        taken = [number(entry[name]) for name in ("seconds", "first", "round")]
        amount = number(memory.get("reserved", memory.get("resident", 0.0)))
        rows.append([entry["workload"]["name"], entry["way"], str(entry["rounds"]), *taken, amount])
    return markdown(rows)


def number(value: float) -> str:
    """Three significant digits; all digits of integers from 100."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is the header."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def about(entry: Entry) -> str:
    return f"{entry['workload']['name']}: {entry['about']}"


def peaks(entry: Entry) -> str:
    """The measured bandwidth and rates of the machine."""
    found = entry["peaks"]
    rates = ", ".join(f"{number(rate / 1e12)} ({name})" for name, rate in found.items() if name != "bandwidth")
    return f"copy {number(found['bandwidth'] / 1e9)} GB/s; matrix products, TFLOP/s: {rates}"


def growth(sweep: Entry) -> str:
    """A sweep: a round without evaluation, ours and the plain loop's."""
    rows = [[sweep["across"], "round, s", "plain loop, s", "speedup", "CPU time, s", "plain loop's CPU time, s"]]
    for point in sweep["points"]:
        ours, plain = point["seconds"], point["plain_seconds"]
        work = (number(point["cpu_seconds"]), number(point["plain_cpu_seconds"]))
        rows.append([f"{point['value']:g}", number(ours), number(plain), f"{plain / ours:.1f}×", *work])
    return markdown(rows)
