"""What was measured, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

Entry = dict[str, Any]

NOTES = """\
Medians. *Statistics*: the clients' part of the same rounds without an SGD step (0 epochs, of FedPAC's head too), timed
in the same run; *training* is the rest of the clients' part. *Overhead*: the round less all others. These five are of
rounds in which every phase waits for the device; the round without evaluation does not. The plain loop evaluates
nothing, solves no quadratic programs and does not augment. *CPU time*: of all processes, in the round without
evaluation. *Floor*: the larger of operations / peak and bytes / bandwidth of the SGD steps, with float32 in memory, at
the rates measured in the same run."""


def table(entry: Entry) -> str:
    """A column for each way that a workload was run in."""
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
        "**times as fast**": f"**{found['times_as_fast']:.1f}**",
        "CPU time, s": number(median(found["cpu_seconds"])),
        "plain loop's CPU time, s": number(median(found["plain_cpu_seconds"])),
        "SGD step of all, ms": number(step),
        "plain loop's, ms": number(found["plain_step_ms"]),
        "times as fast a step": f"{found['plain_step_ms'] / step:.1f}",
        f"floor at {', '.join(floor)}, ms": ", ".join(number(f) for f in floor.values()),
        "times the floor": ", ".join(f"{step / f:.1f}" for f in floor.values()),
        "wasted steps": "-" if found["wasted"] is None else f"{100 * found['wasted']:.1f} %",
        **{f"memory {kind}, GB": number(amount) for kind, amount in found["memory_gb"].items()},
    }


def runs(entries: Iterable[Entry]) -> str:
    """Whole runs, a line for each."""
    rows = [["run", "way", "rounds", "whole run, s", "first round, s", "later rounds, s each", "GB reserved"]]
    for entry in entries:
        memory = entry["memory_gb"]
        taken = [number(entry[name]) for name in ("seconds", "first", "round")]
        amount = number(memory.get("reserved", memory.get("resident", 0.0)))
        rows.append([entry["workload"]["name"], entry["way"], str(entry["rounds"]), *taken, amount])
    return markdown(rows)


def number(value: float) -> str:
    """Three digits that count; more before the point where there are."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(rows: list[list[str]]) -> str:
    """A table, its first row the header."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def about(entry: Entry) -> str:
    return f"{entry['workload']['name']}: {entry['about']}"


def peaks(entry: Entry) -> str:
    """What the machine was measured to do."""
    found = entry["peaks"]
    rates = ", ".join(f"{number(rate / 1e12)} at {name}" for name, rate in found.items() if name != "bandwidth")
    return f"{number(found['bandwidth'] / 1e9)} GB/s copying; products, 10¹² operations a second: {rates}"


def growth(sweep: Entry) -> str:
    """A sweep: a round without evaluation, ours and the loop's."""
    rows = [
        [sweep["across"], "a round, s", "plain loop, s", "times as fast", "CPU time, s", "plain loop's CPU time, s"]
    ]
    for point in sweep["points"]:
        ours, plain = point["seconds"], point["plain_seconds"]
        work = (number(point["cpu_seconds"]), number(point["plain_cpu_seconds"]))
        rows.append([f"{point['value']:g}", number(ours), number(plain), f"{plain / ours:.1f}", *work])
    return markdown(rows)
