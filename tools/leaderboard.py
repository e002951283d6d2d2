"""Run every method with `coterie compare all --protocol quick`, and keep what docs/leaderboard.md shows.

Methods that need normalization layers run on a network that has some, next to FedAvg.

`python -m tools.leaderboard` writes benchmarks/results/leaderboard.json; `python -m tools.ledger` makes the page of it.
`python -m tools.leaderboard superfed` runs some methods again and replaces their rows, which name their own commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from coterie.methods import METHODS
from coterie.papers.results import committed, hardware

FILE = Path("benchmarks/results/leaderboard.json")
COMMAND = ("compare", "all", "--protocol", "quick")
NORMALIZED = ("--model", "conv4", "--model-args", "bn=stats")  # a network with BatchNorm
NETWORK = "conv4 with BatchNorm"
KEPT = ("method", "seed", "reported", "mean", "std", "worst10", "megabytes")


def main(again: Sequence[str]) -> None:
    """again: the methods to run again; empty: all."""
    start, needy = time.monotonic(), [name for name, kind in METHODS.items() if kind.needs_norm]
    table = compared(("compare", *again, *COMMAND[2:]) if again else COMMAND)
    normalized = compared(("compare", "fedavg", *needy, *COMMAND[2:], *NORMALIZED))
    if again:
        found = replaced(json.loads(FILE.read_text(encoding="utf-8")), table, normalized)
    else:
        found = kept(table, normalized, time.monotonic() - start)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(FILE)


def compared(command: Sequence[str]) -> dict[str, Any]:
    """The JSON of a comparison."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "coterie", *command, "--json", "--out", str(Path(folder) / "runs")]
        output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
    found: dict[str, Any] = json.loads(output)
    return found


def kept(table: dict[str, Any], normalized: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What the page shows, with the circumstances. normalized: the comparison on a network with BatchNorm."""
    ran = {row["method"] for row in normalized["outcomes"]}
    return {
        "command": f"coterie {' '.join(COMMAND)}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": committed(Path("src/coterie")),
        "hardware": hardware("cpu"),
        "torch": torch.__version__,
        "seconds": round(seconds),
        **{name: table[name] for name in ("data", "clients", "metric")},
        "refused": {name: reason for name, reason in table.get("refused", {}).items() if name not in ran},
        "outcomes": [of_row(row) for row in table["outcomes"]],
        "network": NETWORK,
        "normalized": [of_row(row) for row in normalized["outcomes"]],
    }


def replaced(found: dict[str, Any], table: dict[str, Any], normalized: dict[str, Any]) -> dict[str, Any]:
    """The stored table with some rows replaced."""
    made = {"commit": committed(Path("src/coterie"))}
    rows = {row["method"]: of_row(row) | made for row in table["outcomes"]}
    ran = {row["method"] for row in normalized["outcomes"]}
    return found | {
        "refused": {name: reason for name, reason in found["refused"].items() if name not in ran},
        "outcomes": [rows.get(row["method"], row) for row in found["outcomes"]],
        "network": NETWORK,
        "normalized": [of_row(row) | made for row in normalized["outcomes"]],
    }


def of_row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in KEPT}


if __name__ == "__main__":
    main(sys.argv[1:])
