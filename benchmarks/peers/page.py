"""The table of docs/performance.md from benchmarks/results/peers.json."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import tables

RESULTS = Path(__file__).parent.parent / "results" / "peers.json"
OURS = "Coterie"
SHOWN = 0  # the measurement whose accuracy is shown; all have taken the same steps, in other orders


def page() -> str:
    """A table for each workload."""
    if not RESULTS.exists():
        return "Not measured yet."
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    return "\n\n".join(f"{about(name, entry)}\n\n{table(entry)}" for name, entry in content.items())


def about(name: str, entry: dict[str, Any]) -> str:
    loads = [value for value in entry["load"] if value is not None]
    return (
        f"`{name}`: {entry['about']}; {entry['rounds']} rounds of one epoch, {entry['steps']:,} SGD steps. "
        f"{entry['machine']}; commit {entry['commit']}, {entry['date']}; load average {min(loads):g} to {max(loads):g}."
    )


def table(entry: dict[str, Any]) -> str:
    """The medians, and the ratio to Coterie within each turn, with its range."""
    rows = [
        ["simulator", "version", "torch", "Python", "CPU time, s", "time, s", "CPU time / Coterie's", "accuracy, %"]
    ]
    ours = entry["simulators"][OURS]["cpu_seconds"]
    for name, found in entry["simulators"].items():
        ratios = [theirs / own for theirs, own in zip(found["cpu_seconds"], ours, strict=True)]
        spread = "" if name == OURS else f" ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(
            [
                name,
                found["version"] or "this commit",
                found["torch"],
                found["python"],
                tables.number(median(found["cpu_seconds"])),
                tables.number(median(found["seconds"])),
                f"{median(ratios):.2f}{spread}",
                f"{100 * found['accuracy'][SHOWN]:.1f}",
            ]
        )
    return tables.markdown(rows)
