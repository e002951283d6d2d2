"""Accuracy per round against the FedPAC authors' released code, on the same partition of Fashion-MNIST.

`fashion_mnist_20_clients.npz`: row i has the samples of client i. `fashion_mnist_authors_code.json`: what their code
gave, one seed. Ours: the mean of three.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import coterie
from coterie.core.data import FederatedData

HERE = Path(__file__).parent / "reference"
SEEDS = (0, 1, 2)
TOLERANCE = 1.5  # percentage points


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    return coterie.load_clients("fashion-mnist", partition=str(HERE / "fashion_mnist_20_clients.npz"))


@pytest.mark.slow
@pytest.mark.parametrize("title", ["FedAvg", "FedPer", "FedPAC", "Local"])
def test_accuracies_are_those_of_the_authors(title: str, clients: FederatedData) -> None:
    theirs = json.loads((HERE / "fashion_mnist_authors_code.json").read_text())["methods"][title]
    runs = [coterie.run(title.lower(), clients, "cnn", rounds=20, seed=seed, evaluate_every=5) for seed in SEEDS]
    curves = [{point: dict(run.history.curve(point)) for point in ("pre", "post")} for run in runs]
    print(f"\n{title}: ours (mean of {len(SEEDS)} seeds) / the authors' code")
    apart = {}
    for number in (5, 10, 20):
        for point, reference in (("pre", theirs["before"][number]), ("post", theirs["after"][number - 1])):
            ours = 100 * sum(curve[point][number] for curve in curves) / len(curves)
            apart[point, number] = ours - reference
            print(f"  round {number:2} {point:4} {ours:.2f} / {reference:.2f}")
    assert all(abs(difference) <= TOLERANCE for difference in apart.values()), apart
