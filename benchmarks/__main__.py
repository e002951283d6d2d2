"""Compare rounds of Coterie with a plain loop over modules and with the limits of the machine.

python -m benchmarks [--only cifar-20,fmnist-20] [--sweep clients] [--device cuda] [--out FILE]

By default, a CPU runs only the workloads that take minutes, and data are generated. Each workload is written to the
file as soon as it is measured; other entries are kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from benchmarks import tables
from benchmarks.machine import load, provenance
from benchmarks.ours import measure, whole
from benchmarks.roofline import peaks
from benchmarks.sweep import POINTS, base, sweep
from benchmarks.workloads import WORKLOADS, Workload
from coterie.api import Execution
from coterie.cli.flags import add_flags, given
from coterie.core.errors import CoterieError, unknown
from coterie.execution.backend import PRECISIONS
from coterie.execution.looped import cores


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--only", default="", help=f"comma-separated workloads: {', '.join(WORKLOADS)}")
    parser.add_argument("--sweep", default="", help=f"run sweeps instead, comma-separated: {', '.join(POINTS)}")
    parser.add_argument("--whole", default="", help="time whole runs of these workloads instead, comma-separated")
    parser.add_argument(
        "--whole-rounds", type=int, default=None, help="rounds of a whole run (default: the workload's)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds per workload (default: 3)")
    parser.add_argument("--quick", action="store_true", default=False, help="use tiny workloads, as a smoke test")
    parser.add_argument("--profile", action="store_true", default=False, help="also profile operations")
    parser.add_argument("--data", choices=("generated", "real"), default="generated")
    parser.add_argument("--data-dir", default=None, help="folder with datasets (or set COTERIE_DATA)")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="commit to record (default: from git)")
    add_flags(parser, "execution", Execution)
    return parser


def chosen_workloads(chosen: argparse.Namespace, device: str) -> list[Workload]:
    names = [n for n in chosen.only.split(",") if n]
    for name in (*names, *chosen.whole.split(",")):
        if name and name not in WORKLOADS:
            raise unknown("workload", name, WORKLOADS)
    if not names and not chosen.sweep and not chosen.whole:
        names = [w.name for w in WORKLOADS.values() if w.on_cpu or device != "cpu"]
    return [as_asked(WORKLOADS[name], chosen) for name in names]


def as_asked(w: Workload, chosen: argparse.Namespace) -> Workload:
    w = w.quick() if chosen.quick else w
    return replace(w, real=chosen.data == "real", data_dir=chosen.data_dir)


def chosen_ways(how: Execution, precision: str | None) -> list[Execution]:
    """On a GPU all precisions unless one is given. On several cores also one process, like the plain loop."""
    if how.device != "cpu":
        return [replace(how, precision=name) for name in ([precision] if precision else PRECISIONS)]
    alone = replace(how, processes=1)
    several = how.device == "cpu" and how.backend in ("auto", "looped") and how.processes is None and cores() > 1
    return [how, alone] if several else [how]


class File:
    """The results by kind and name; written atomically after each measurement."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {"workloads": {}, "runs": {}, "sweeps": {}}
        if path and not path.parent.is_dir():
            raise CoterieError(f"{path}: folder {path.parent} not found")
        if path and path.exists():
            self.found |= self._there(path)

    def _there(self, path: Path) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CoterieError(f"{path} cannot be read: {error}") from None
        if not isinstance(found, dict) or not found.keys() <= self.found.keys():
            raise CoterieError(f"{path} exists and is not a file of benchmark results; choose another file")
        return found

    def add(self, kind: str, name: str, entry: dict[str, Any]) -> None:
        self.found[kind][name] = entry
        if self.path:
            part = self.path.with_name(f"{self.path.name}.part")
            part.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            os.replace(part, self.path)


def run(chosen: argparse.Namespace) -> None:
    how = Execution(**given(chosen, Execution))
    device = how.device if how.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    how = replace(how, device=device)
    if chosen.rounds < 1:
        raise CoterieError(f"rounds must be at least 1, got {chosen.rounds}")
    for what in (sweeps := [s for s in chosen.sweep.split(",") if s]):
        if what not in POINTS:
            raise unknown("sweep", what, POINTS)
    precision = getattr(chosen, "precision", None)
    workloads, file = chosen_workloads(chosen, device), File(chosen.out)
    origin = provenance(device) | ({"commit": chosen.commit} if chosen.commit else {})
    limits = peaks(device, chosen.quick) if workloads else {}
    for w in workloads:
        before = load()
        entry = {**origin, **measure(w, chosen_ways(how, precision), chosen.rounds, limits, chosen.profile)}
        entry["load"] = [before, load()]
        file.add("workloads", w.name, entry)
        print(
            f"\n{tables.about(entry)}\n{origin['machine']}: {tables.peaks(entry)}\n\n{tables.table(entry)}",
            flush=True,
        )
    if workloads:
        print(f"\n{tables.NOTES}")
    for name in chosen.whole.split(",") if chosen.whole else ():
        for way in chosen_ways(how, precision):
            before = load()
            found = whole(as_asked(WORKLOADS[name], chosen), way, chosen.whole_rounds)
            file.add("runs", f"{name}, {way.precision}", {**origin, **found, "load": [before, load()]})
            print(f"\n{tables.runs([found])}", flush=True)
    for what in sweeps:
        before = load()
        found = sweep(what, as_asked(base(device), chosen), how, chosen.rounds, chosen.quick)
        file.add("sweeps", what, {**origin, **found, "load": [before, load()]})
        print(f"\n{found['about']}\n\n{tables.growth(found)}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        run(flags().parse_args(argv))
    except CoterieError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    logging.getLogger("coterie").addHandler(logging.StreamHandler())
    main()
