"""Many methods on one setting, into one small file of results.

python -m benchmarks.table --dataset fashion-mnist --out benchmarks/results/fashion-mnist-20.json METHOD ...
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import coterie
from benchmarks.__main__ import provenance
from coterie.core.errors import CoterieError


def cell(method: str, data: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """One run: what it reports, its curves, its time."""
    start = time.perf_counter()
    where = coterie.Execution(device=chosen.device)
    result = coterie.run(
        method, None, data, where=where, rounds=chosen.rounds, seed=chosen.seed, protocol=chosen.protocol
    )
    history = result.history
    return {
        "method": method,
        "seed": chosen.seed,
        "outcomes": {o.name: {"point": o.point, **o.last._asdict()} for o in result.outcomes()},
        "last": {p: c[-1][1] for p in ("pre", "post", "global", "finished") if (c := history.curve(p))},
        "curves": {
            p: [round(100 * accuracy, 2) for _, accuracy in history.curve(p)] for p in ("pre", "post", "global")
        },
        "seconds": {
            "total": round(time.perf_counter() - start, 2),
            **{p: round(sum(r.seconds.get(p, 0.0) for r in history), 2) for p in ("train", "receive", "evaluate")},
        },
        "bytes_up": sum(r.bytes_up for r in history),
        "bytes_down": sum(r.bytes_down for r in history),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--data-dir")
    parser.add_argument("--protocol", default="pac")
    parser.add_argument("--num-clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this many")
    parser.add_argument("--commit", help="where git does not say it")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    begun = time.perf_counter()
    data = coterie.load_clients(
        chosen.dataset, data_dir=chosen.data_dir, num_clients=chosen.num_clients, protocol=chosen.protocol
    )
    about = {**provenance("cuda" if torch.cuda.is_available() else "cpu"), "workload": vars(chosen) | {"out": ""}}
    about["commit"] = chosen.commit or about["commit"]
    about["partition"] = data.partition.hash
    cells = []
    for method in chosen.methods:
        if time.perf_counter() - begun > chosen.seconds:
            print("no time left for", method)
            continue
        try:
            cells.append(cell(method, data, chosen))
        except CoterieError as error:
            print(f"{method}: {error}", flush=True)
            continue
        torch.cuda.empty_cache()
        done = cells[-1]
        told = {name: round(100 * o["mean"], 2) for name, o in done["outcomes"].items()}
        print(method, told, {k: round(100 * v, 2) for k, v in done["last"].items()}, done["seconds"], flush=True)
        chosen.out.write_text(json.dumps({**about, "cells": cells}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
