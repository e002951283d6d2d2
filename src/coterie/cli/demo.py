"""The demo: four methods on the shipped data."""

from __future__ import annotations

from typing import Any

METHODS = ["local", "fedavg", "fedpac"]  # FedAvg-FT comes from FedAvg's run

SETTINGS: dict[str, Any] = {
    "dataset": "fashion-mnist-small",
    "num_clients": 20,
    "noniid_s": 20.0,
    "local_size": 150,
    "test_size": 150,
    "rounds": 8,
    "batch_size": 25,
    "evaluate_every": 2,
}
