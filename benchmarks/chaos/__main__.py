"""Attack local Coterie processes and record the outcome.

python -m benchmarks.chaos [--kills 200] [--parser 100000] [--live 20000] [--rounds 20] [--seed 0] [--out FILE]

A count of 0 skips a part and keeps its figures in the file. Everything is bound to 127.0.0.1 and runs in a temporary
folder. The first wrong result stops the program with an error. `--page` writes the figures of the file into
docs/security.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.chaos import page
from benchmarks.machine import provenance

SHARES = {"run": 0.3, "compare": 0.15, "tune": 0.15, "reproduce": 0.15, "serve": 0.125, "join": 0.125}  # of the kills


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="random kills with kill -9 (default: 200)")
    parser.add_argument("--parser", type=int, default=100_000, help="hostile messages to the parsers (default: 100000)")
    parser.add_argument("--live", type=int, default=20_000, help="hostile messages through a broker (default: 20000)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds with failing devices (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument("--out", type=Path, default=page.FIGURES, help=f"file to write (default: {page.FIGURES})")
    parser.add_argument("--page", action="store_true", help="only write the figures of the file into the page")
    return parser


def measure(chosen: argparse.Namespace, folder: Path, keep: Callable[[str, Any], None]) -> None:
    from benchmarks.chaos import dropouts, hostile, kills

    def timed(name: str, act: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        start = time.monotonic()
        found = act(*arguments)
        keep(name, {**found, "seed": chosen.seed, "seconds": round(time.monotonic() - start)})

    if chosen.parser:
        timed("parser", hostile.at_the_parser, chosen.parser, chosen.seed)
    if chosen.live:
        timed("live", hostile.live, chosen.live, chosen.seed, folder)
    if chosen.rounds:
        timed("dropouts", dropouts.dying, chosen.rounds, chosen.seed, folder / "dying")
    for name, share in SHARES.items() if chosen.kills else ():
        count, draw = max(1, round(share * chosen.kills)), random.Random(f"{chosen.seed} {name}")
        act = kills.killed if name in kills.COMMANDS else kills.killed_federations
        timed(f"kills {name}", act, name, count, folder, draw)


def check(figures: dict[str, Any]) -> list[str]:
    """The wrong results, as messages."""
    wrong = []
    for name, found in figures.items():
        if found.get("accepted"):
            wrong.append(f"{name}: {found['accepted']} hostile messages were accepted")
        if name.startswith("kills") and found["bit_equal"] != found["runs"]:
            wrong.append(f"{name}: {found['runs'] - found['bit_equal']} of {found['runs']} resumed runs differ")
        if found.get("memory_mb", 0) > page.MOST_MEMORY:
            wrong.append(f"{name}: memory grew by {found['memory_mb']} MB")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    chosen = flags().parse_args(argv)
    if chosen.page:
        page.write(chosen.out)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are stopped
    about = provenance("cpu")
    recorded: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}

    def keep(name: str, found: Any) -> None:
        recorded[name] = {**found, **about}
        print(f"{name}: {json.dumps(found)}", flush=True)
        chosen.out.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")

    with TemporaryDirectory() as folder:
        measure(chosen, Path(folder), keep)
    wrong = check(recorded)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
