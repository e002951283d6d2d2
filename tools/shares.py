"""How much clients differ in some draws of a partition, for benchmarks/results/findings.yaml.

`python -m tools.shares` writes benchmarks/results/shares.json. A share is the part of a client's data, in percent, that
has a sample's own class, averaged over all samples. It depends on the counts of classes only, so no data are needed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.dirichlet import dirichlet, dirichlet_crc, dirichlet_pfllib
from coterie.data.partition import Labels, Partition

FILE = Path("benchmarks/results/shares.json")
CRC: dict[str, Any] = {"num_clients": 100, "alpha": 0.1, "min_size": 10, "train_share": 0.8}  # P3-T1-CIFAR10-0.1
AKD: dict[str, Any] = {"num_clients": 10, "alpha": 0.5, "min_size": 1, "train_share": 0.75}  # P4-T1-FMNIST-E5
DRAWS = 40


def share(rule: Callable[..., Partition], samples: int, **settings: Any) -> float:
    """samples: of each of ten classes."""
    labels = Labels("any", np.repeat(np.arange(10), samples), np.arange(0), tuple("abcdefghij"))
    made = rule(labels, **settings)
    own = [labels.merged[np.concatenate(both)] for both in zip(made.train, made.test, strict=True)]
    counts = np.stack([np.bincount(classes, minlength=10) for classes in own])  # (client, class)
    return float(100 * (counts**2 / counts.sum(1, keepdims=True)).sum() / counts.sum())


def computed() -> dict[str, Any]:
    drawn = [share(dirichlet_crc, 6000, seed=seed, **CRC) for seed in range(DRAWS)]
    fedcrc = {"seed0": drawn[0], "seed1": drawn[1], "mean": statistics.fmean(drawn), "std": statistics.stdev(drawn)}
    fedcrc["capped"] = share(dirichlet, 6000, seed=0, **CRC)
    pfakd = {
        name: share(dirichlet, 7000, seed=seed, **AKD) for name, seed in (("ours", 42), ("even", 33), ("drawn", 1))
    }
    pfakd["authors"] = share(dirichlet_pfllib, 7000, seed=42, **AKD)
    found = {"fedcrc": fedcrc, "pfakd": pfakd}
    return {name: {key: round(value, 2) for key, value in own.items()} for name, own in found.items()}


def main() -> None:
    FILE.write_text(json.dumps({"command": "python -m tools.shares", **computed()}, indent=1) + "\n", encoding="utf-8")
    print(FILE)


if __name__ == "__main__":
    main()
