"""Clients behind a transport compute the same federation, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.api import DataSettings
from coterie.core import tree
from coterie.deploy.device_data import load_hosted_clients
from coterie.federation import Settings, federate
from coterie.methods import METHODS
from tests import direct, toy

every_method = pytest.mark.parametrize("name", METHODS)
TWO = Settings(rounds=2, join_ratio=0.6, seed=7)  # clients 2 and 4 take part in both


@every_method
def test_the_same_as_in_one_process(name: str, tmp_path: Path) -> None:
    method, model, data = direct.small(name)
    expected, history = toy.looped(method, model, data, rounds=2)
    server, found = federate(direct.remote(method, model, data, tmp_path), TWO)
    toy.assert_same({n: t for n, t in expected.items() if n.startswith("server")}, tree.flatten({"server": server}))
    for a, b in zip(history, found, strict=True):
        assert (a.bytes_up, a.bytes_down, a.left_out) == (b.bytes_up, b.bytes_down, b.left_out)
        assert {k: toy.rows(v) for k, v in a.scores.items()} == {k: toy.rows(v) for k, v in b.scores.items()}


def test_devices_load_every_task() -> None:
    assert load_hosted_clients("0", DataSettings(dataset="heart-rate"))[1].task.name == "regression"
    assert (
        load_hosted_clients("0", DataSettings(dataset="heart-disease", metric="auroc"))[1].task.metric.name == "auroc"
    )
    assert load_hosted_clients("0,2", DataSettings(dataset="heart-disease"))[1].num_clients == 2
