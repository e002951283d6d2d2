"""Run every method with `coterie compare all --protocol quick`, and keep what docs/leaderboard.md shows.

`python -m tools.leaderboard` writes benchmarks/results/leaderboard.json; `python -m tools.ledger` makes the page of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from coterie.papers.results import committed, hardware

FILE = Path("benchmarks/results/leaderboard.json")
COMMAND = ("compare", "all", "--protocol", "quick")
KEPT = ("method", "seed", "reported", "mean", "std", "worst10", "megabytes", "seconds")


def main() -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "coterie", *COMMAND, "--json", "--out", str(Path(folder) / "runs")]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
    found = kept(json.loads(output), time.monotonic() - start)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(FILE)


def kept(table: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What the page shows, with the circumstances."""
    return {
        "command": f"coterie {' '.join(COMMAND)}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": committed(Path("src/coterie")),
        "hardware": hardware("cpu"),
        "torch": torch.__version__,
        "seconds": round(seconds),
        **{name: table[name] for name in ("data", "clients", "metric")},
        "refused": table.get("refused", {}),
        "outcomes": [{name: row[name] for name in KEPT} for row in table["outcomes"]],
    }


if __name__ == "__main__":
    main()
