"""Writes the table of personal adapters in docs/networks.md from benchmarks/results/adapters.json, or checks it.

python -m tools.adapters          write it
python -m tools.adapters --check  fail if the page differs from the file

The file is what examples/adapters.py writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from coterie.analysis.significance import Spread
from tools.ledger import renewed

FILE = Path("benchmarks/results/adapters.json")
PAGE = Path("docs/networks.md")
MARK = "adapters"
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion-mnist-small": "the Fashion-MNIST subset"}
HEADER = (
    "trained", "method", "learning rate", "trained numbers", "accuracy, %", "after half of the rounds, %", "MB sent",
    "seconds",
)  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """What was done, one row per way, and where."""
    seeds = min(len(arm["runs"]) for arm in found["arms"])  # those that all ways have, if the script was stopped
    found = found | {"arms": [arm | {"runs": arm["runs"][:seeds]} for arm in found["arms"]]}
    return "\n\n".join([setting(found), table(found), origin(found)])


def setting(found: dict[str, Any]) -> str:
    plan, images, tested = found["plan"], found["images"], found["pretraining"]
    first, second = images[plan["pretraining"]], images[plan["federated"]]
    return (
        f"A vision transformer (`vit-tiny`, {plan['depth']} layers, patches of {plan['patch']}) is pretrained on "
        f"{first['train']:,} images of {TITLES[plan['pretraining']]} for {plan['epochs']} epochs, which gives "
        f"{100 * tested['accuracy']:.1f} % on {first['test']:,} test images. Then {plan['clients']} clients with "
        f"{plan['local_size']} training and {plan['local_size'] // 2} test images of {TITLES[plan['federated']]} each, "
        f"drawn from {second['train']:,} + {second['test']:,}, personalize it with a new head: {plan['rounds']} rounds "
        f"of {plan['local_epochs']} local epochs, AdamW, LoRA of rank {plan['rank']} on attention:"
    )


def table(found: dict[str, Any]) -> str:
    lines = [f"| {' | '.join(HEADER)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    return "\n".join([*lines, *(f"| {' | '.join(row(arm))} |" for arm in found["arms"])])


def row(arm: dict[str, Any]) -> list[str]:
    runs = arm["runs"]
    curves = [run["accuracy_by_round"] for run in runs]
    middle = len(curves[0]) // 2 - 1
    return [
        arm["name"],
        {"fedper": "FedPer", "ditto": "Ditto", "local": "Local"}[arm["method"]],
        f"{arm['lr']:g}",
        f"{arm['trained_parameters']:,}",
        spread([run["accuracy"] for run in runs]),
        spread([curve[middle][1] for curve in curves]),
        f"{median(run['bytes'] for run in runs) / 1e6:,.1f}",
        f"{median(run['seconds'] for run in runs):.1f}",
    ]


def spread(shares: list[float]) -> str:
    """Mean ± half of the 95 % interval, in percent."""
    found = Spread.of([100 * share for share in shares])
    return f"{found.mean:.1f}" if found.half is None else f"{found.mean:.1f} ± {found.half:.1f}"


def origin(found: dict[str, Any]) -> str:
    seeds = len(found["arms"][0]["runs"])
    repeated = (
        f", ± half of the 95 % interval (Student's t) over {seeds} seeds, each with its own partition, head, adapters "
        "and batches; the network was pretrained once. "
    )
    return (
        f"Mean over clients after the last round{repeated if seeds > 1 else ', one run each. '}{rates(found)}"
        "MB are those of both directions, all clients and rounds; frozen numbers are sent once to each client and are "
        "not in it. Seconds are the median of whole runs, with setup and evaluation after every round; pretraining "
        f"took {found['pretraining']['seconds']:.0f} s, and all together {found['seconds']:.0f} s. {found['device']}, "
        f"{found['precision']}, torch {found['torch']}, Python {found['python']}, commit {found['commit']}, "
        f"{found['date']}."
    )


def rates(found: dict[str, Any]) -> str:
    tried = max(len(arm["validation_accuracy"]) for arm in found["arms"])
    if not tried:
        return "Learning rates were not tuned. "
    return (
        f"Each way's learning rate is the best of {tried} on validation samples of the first partition after "
        f"{found['plan']['search_rounds']} rounds. "
    )


def page(root: Path) -> str:
    old = (root / PAGE).read_text(encoding="utf-8")
    found = json.loads((root / FILE).read_text(encoding="utf-8"))
    return renewed(old, {MARK: f"\n\n{text(found)}\n\n"}, str(PAGE))


def main(argv: list[str]) -> None:
    made, root = page(Path()), Path()
    if "--check" not in argv:
        (root / PAGE).write_text(made, encoding="utf-8")
    elif (root / PAGE).read_text(encoding="utf-8") != made:
        sys.exit(f"{PAGE} does not match {FILE}; run python -m tools.adapters")


if __name__ == "__main__":
    main(sys.argv[1:])
