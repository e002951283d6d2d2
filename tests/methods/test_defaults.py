"""Defaults that were looked up: in the authors' code, or in a reproduction of the paper. Docstrings name the others."""

from __future__ import annotations

from typing import Any

import pytest

from coterie import make_method

FOUND: dict[str, dict[str, Any]] = {
    "fedcp": {"align": 5.0},  # TsingZ0/FedCP, run_me.sh: -lam 5
    "feddbe": {"pull": 50.0, "inertia": 0.0},  # TsingZ0/DBE, run_me.sh: -klw 50 -mo 1, of half the squared error
    "fedtgp": {"align": 10.0, "margin": 100.0, "server_epochs": 100},  # TsingZ0/FedTGP: -lam 10 -mart 100 -se 100
    "fedgh": {"server_lr": 0.01, "server_epochs": 1, "server_batch": 1},  # LipingYi/FedGH: --lr, one step per mean
    "fml": {"personal_share": 0.5, "shared_share": 0.5},  # ZJU-DAI/Federated-Mutual-Learning, Args.py
    "fedgen": {"noise": 32, "hidden_units": 256, "diversity": 1.0, "server_lr": 1e-4, "server_steps": 50}
    | {"server_batch": 32},  # zhuangdizhu/FedGen, model_config.py for emnist; main.py --batch_size
    "superfed": {"pull": 0.01, "apart": 2.0}  # vaseline555/SuPerFed, main.py: --mu, --nu
    | {"begin": 40},  # of 100 rounds: the paper; commands/personalization: --L 0.4
    "fedphp": {"inherit": 0.9, "transfer": 0.1, "growth": 100},  # lxcnju/FedRepo, fedphp.py: 0.9; 0.1 of 1000 rounds
    "fedntd": {"distill": 1.0, "temperature": 1.0},  # Lee-Gihun/FedNTD, config/fedntd.json: beta, tau
    "apple": {"relation_lr": 1e-3, "pull": 0.1, "pull_rounds": 16},  # ljaiverson/pFL-APPLE; a tenth of 160 rounds
    "floco": {"endpoints": 10, "radius": 0.1},  # of the Five-Fold split
    "per-fedavg": {"weight_by_samples": False},  # the paper's mean over clients
    "cfl": {"settled": 0.4, "apart": 1.6},  # felisat/clustered-federated-learning: EPS_1, EPS_2
    "fedadam": {"server_lr": 0.01, "server_beta1": 0.9, "server_beta2": 0.99, "server_eps": 1e-3},  # Flower's baseline
    "fedadagrad": {"server_lr": 0.1},  # of the paper on CIFAR-10: conf/cifar10/strategy
}


@pytest.mark.parametrize("name", FOUND)
def test_defaults_are_those_found(name: str) -> None:
    method = make_method(name)
    assert {setting: getattr(method, setting) for setting in FOUND[name]} == FOUND[name]
