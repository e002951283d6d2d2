"""Every precision, model of the catalogue and way of computing on a GPU: one round against fp32, looped.

Without pytest: `python -m tests.precisions` prints a line for each combination and exits with 1 if any fails;
`python -m tests.precisions cpu` does the same on a CPU.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch

from coterie.core import tree
from coterie.core.data import FederatedData, Split, Transform
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Request, Stacked
from coterie.execution.backend import PRECISIONS
from coterie.federation import Settings
from coterie.federation.rounds import play
from coterie.methods import METHODS
from coterie.models import MODELS, build

WAYS: dict[str, Any] = {"looped": Looped, "stacked": Stacked}
# An LSTM has no vmap rule; a U-Net is no classifier.
COMBINATIONS = [c for c in product(MODELS, PRECISIONS, WAYS) if c[::2] != ("lstm", "stacked") and c[0] != "unet"]
# Largest distance from the weights that fp32 gives, looped, relative to how far training moved them.
TOLERANCE = {"fp32": 0.02, "tf32": 0.1, "bf16": 0.5}
SHAPE, CLASSES = (3, 32, 32), 4
SERIES = {"cnn1d": (3, 32), "lstm": (32, 3), "transformer": (32, 3)}  # networks that take no images
SIZES = (24, 24, 18, 13)  # stacked in pairs: the first needs no padding, the second does


def data(name: str) -> FederatedData:
    """Samples for this network: images, or series."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, CLASSES, (sum(SIZES),), generator=draw)
    if name in SERIES:
        series = torch.randn(sum(SIZES), *SERIES[name], generator=draw) + y[:, None, None]
        held = Split(series, y, SIZES)
        return FederatedData("tiny", CLASSES, held, held)
    x = torch.randint(0, 120, (sum(SIZES), *SHAPE), generator=draw, dtype=torch.uint8)
    x[torch.arange(len(y)), :, 8 * y] += 120  # something to learn: a bright row
    held = Split(x, y, SIZES)
    return FederatedData("tiny", CLASSES, held, held, transform=Transform((0.4,) * 3, (0.2,) * 3))


@cache
def trained(name: str, precision: str, way: str, device: str) -> tuple[tree.Tree, tree.Tree]:
    """Weights before and after a round of FedAvg in which every client takes one step: more would amplify rounding."""
    given = data(name)
    model = make_model(build(name, given.shape, CLASSES, 0), given.shape, CLASSES, given.transform)
    method = METHODS["fedavg"](train=LocalTraining(local_epochs=1, batch_size=24, lr=0.02))
    more = {"cohort": 2} if way == "stacked" else {"processes": 1}
    clients = WAYS[way](method, replace(model, precision=precision), given, 0, device, **more)
    try:
        if way == "stacked":
            cohorts = clients.cohorts(Request("train"), torch.arange(len(SIZES)))
            assert sorted(cohort.ragged for cohort in cohorts) == [False, True]
        server = method.server_init(clients.model, clients.census)
        clients.join(method.server_welcome(server))
        server, record = play(server, clients, Settings(rounds=1), 0)
    finally:
        clients.close()
    losses = record.scores["post", "test"].loss
    assert losses.isfinite().all(), f"losses {losses.tolist()}"
    return tree.flatten(model.start), {n: t.cpu() for n, t in tree.items(server.weights)}


def distance(name: str, precision: str, way: str, device: str) -> float:
    """Of the weights after training from those of fp32, looped, relative to how far these moved."""
    start, found = trained(name, precision, way, device)
    exact = trained(name, "fp32", "looped", device)[1]
    assert all(t.isfinite().all() and t.dtype == torch.float32 for t in found.values())
    names = list(tree.trained(exact))
    apart = sum((found[n] - exact[n]).square().sum() for n in names)
    moved = sum((exact[n] - start[n]).square().sum() for n in names)
    return float((apart / moved) ** 0.5)


def main(device: str) -> int:
    failures = 0
    for name, precision, way in COMBINATIONS:
        if precision == "tf32" and device == "cpu":
            continue
        begin = time.perf_counter()
        try:
            apart = distance(name, precision, way, device)
            word = "ok" if apart <= TOLERANCE[precision] else "FAILED"
            told = f"{apart:.2e} from fp32, at most {TOLERANCE[precision]:g}"
        except Exception as error:
            word, told = "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        failures += word != "ok"
        print(f"{word:7}{name:11} {precision} {way:8} {told} ({time.perf_counter() - begin:.1f} s)", flush=True)
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
