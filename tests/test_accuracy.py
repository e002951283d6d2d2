"""Accuracy of every method on the shipped Fashion-MNIST, on a CPU: none is broken, and what papers agree on holds."""

from __future__ import annotations

from functools import cache

import pytest

import coterie
from coterie.cli.train import DEMO_SETTINGS
from coterie.core.data import FederatedData
from coterie.methods import METHODS

SEEDS = (0, 1, 2)


@cache
def uneven() -> FederatedData:
    return coterie.load_clients(partition="dominant", num_clients=20, local_size=150, test_size=150)


def accuracies(method: str, data: FederatedData, seed: int, rounds: int) -> dict[str, float]:
    """Name of the result, or point of measurement -> accuracy in percent."""
    result = coterie.run(method, data, "cnn", rounds=rounds, seed=seed, batch_size=25, evaluate_every=rounds)
    measured = {p: c[-1][1] for p in ("pre", "post", "global", "finished") if (c := result.history.curve(p))}
    measured |= {o.name: o.last.mean for o in result.outcomes()}
    return {name: 100 * value for name, value in measured.items()}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_beats_chance_clearly(method: str) -> None:
    """With 3 dominant of 10 classes, always naming one of them gives about 30 percent. Six rounds give far more."""
    found = accuracies(method, uneven(), seed=0, rounds=6)
    print(f"\n{method}: { ({name: round(value, 1) for name, value in found.items()}) }")
    reported = [found[name] for name in METHODS[method].results]
    assert max(reported) > 55


def mean(method: str, result: str, data: FederatedData, rounds: int) -> float:
    return sum(accuracies(method, data, seed, rounds)[result] for seed in SEEDS) / len(SEEDS)


@pytest.mark.slow
def test_personalised_methods_are_in_the_order_of_the_papers() -> None:
    """Local < FedPer < FedPAC, FedAvg < FedAvg-FT; means of three seeds."""
    runs = {
        m: [accuracies(m, uneven(), seed, rounds=12) for seed in SEEDS] for m in ("local", "fedper", "fedavg", "fedpac")
    }
    names = {"Local": "local", "FedPer": "fedper", "FedPAC": "fedpac", "FedAvg": "fedavg", "FedAvg-FT": "fedavg"}
    means = {name: sum(run[name] for run in runs[m]) / len(SEEDS) for name, m in names.items()}
    print(f"\n{ ({name: round(value, 2) for name, value in means.items()}) }")
    assert means["Local"] < means["FedPer"] < means["FedPAC"]
    assert means["FedAvg"] < means["FedAvg-FT"]


@pytest.mark.slow
def test_rebalancing_makes_a_better_global_model() -> None:
    """FedReG's global model above FedAvg's under Dirichlet 0.1; means of three seeds."""
    data = coterie.load_clients(partition="dirichlet", alpha=0.1, num_clients=20, min_size=40, partition_seed=1)
    fedreg, fedavg = (mean(m, "global", data, rounds=12) for m in ("fedreg", "fedavg"))
    print(f"\nFedReG {fedreg:.2f}, FedAvg {fedavg:.2f}")
    assert fedreg > fedavg


@pytest.mark.slow
def test_the_demo_tells_the_truth() -> None:
    """FedPAC ends above FedAvg and Local by a margin that every one of three seeds has."""
    settings = dict(DEMO_SETTINGS)
    names = ("dataset", "num_clients", "noniid_s", "local_size", "test_size")
    data = coterie.load_clients(**{name: settings.pop(name) for name in names})
    for seed in SEEDS:
        ends = {m: coterie.run(m, data, None, seed=seed, **settings) for m in ("local", "fedavg", "fedpac")}
        found = {o.name: 100 * o.last.mean for run in ends.values() for o in run.outcomes()}
        print(f"\nseed {seed}: { ({name: round(value, 2) for name, value in found.items()}) }")
        assert found["FedPAC"] > found["Local"] + 1
        assert found["FedPAC"] > found["FedAvg"] + 5
