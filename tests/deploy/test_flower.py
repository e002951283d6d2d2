"""Federations on a real SuperLink with SuperNodes, TLS and node authentication."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from coterie.api import load_clients, run
from coterie.api.saved_run import load_run
from coterie.cli import main
from coterie.runs.config import read_config
from tests import superlink, toy

pytestmark = pytest.mark.flower

NODES = 4
DATA: dict[str, Any] = {"dataset": "fashion-mnist-small", "num_clients": 6, "local_size": 30, "test_size": 20}
HOSTED = ("0-1", "2", "3,5", "4")
SETTINGS = {"join_ratio": 0.5, "local_epochs": 1, "seed": 5}
SIX = ("fedavg", "fedpac", "fedreg", "ditto", "scaffold", "fedpac-proto")


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[superlink.SuperLink]:
    folder = tmp_path_factory.mktemp("flower")
    data = {name.replace("_", "-"): value for name, value in DATA.items()}
    nodes = [{"clients": clients, "dir": str(folder / f"device-{n}"), **data} for n, clients in enumerate(HOSTED)]
    with superlink.superlink(folder, nodes) as started:
        yield started


def app(folder: Path, method: str, **settings: Any) -> Path:
    given = {**SETTINGS, **settings, "num_clients": 6, "model": "mlp"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    main(["flower", str(folder / "app"), method, "--no-full-last-round", *flags])
    return folder / "app"


def assert_same_run(folder: Path, method: str, **settings: Any) -> None:
    """As `coterie run` leaves it, to the last bit."""
    given = {**SETTINGS, "full_last_round": False, **settings}
    run(method, load_clients(**DATA), "mlp", backend="looped", out=folder / "here", **given)
    models = [folder / name / "models" / "server.safetensors" for name in ("here", "run")]
    toy.assert_same(*map(load_file, models))


def test_a_federation(link: superlink.SuperLink, tmp_path: Path) -> None:
    number = link.submit(app(tmp_path, "fedpac", rounds=2, evaluate_every=2), out=str(tmp_path / "run"))
    assert link.wait(number, tmp_path / "run" / "result.json") == "finished:completed"
    assert_same_run(tmp_path, "fedpac", rounds=2, evaluate_every=2)
    accuracy = {client.number: client.score for client in load_run(tmp_path / "here").members}
    federation = read_config(tmp_path / "run")["deployment"]["federation"]
    for n, own in enumerate(((0, 1), (2,), (3, 5), (4,))):
        left = load_run(link.folder / f"device-{n}" / federation[:16] / "run")
        assert {client.number: client.score for client in left.members} == {i: accuracy[i] for i in own}
        for i in own:
            name = f"client-{i}.safetensors"
            toy.assert_same(load_file(tmp_path / "here" / "models" / name), load_file(left.folder / "models" / name))


def test_wrong_settings_are_one_line_in_the_log(link: superlink.SuperLink, tmp_path: Path) -> None:
    number = link.submit(app(tmp_path, "fedpac"), rounds="many")
    assert link.wait(number) == "finished:failed"
    said = link.flwr("log", "--show", number, "here")
    assert "coterie: run config: rounds is 'many': it must be a whole number" in said


def test_a_node_whose_key_is_not_registered_is_refused(link: superlink.SuperLink) -> None:
    link.nodes.append(link.nodes[0])
    superlink.make_node_key(link.folder / "keys" / f"node-{NODES}")
    link.start_node(NODES)
    assert link.running.pop(f"node-{NODES}").wait(120) != 0
    assert "SuperNode ID" not in link.said(f"node-{NODES}")


@pytest.mark.slow
@pytest.mark.parametrize("method", SIX)
def test_the_same_as_in_one_process(link: superlink.SuperLink, tmp_path: Path, method: str) -> None:
    settings = {"rounds": 5, "evaluate_every": 5}
    number = link.submit(app(tmp_path, method, **settings), out=str(tmp_path / "run"))
    assert link.wait(number, tmp_path / "run" / "result.json") == "finished:completed"
    assert_same_run(tmp_path, method, **settings)


@pytest.mark.slow
def test_a_node_that_loses_power_and_comes_back(link: superlink.SuperLink, tmp_path: Path) -> None:
    number = link.submit(app(tmp_path, "fedpac", rounds=3, join_ratio=1.0), out=str(tmp_path / "run"))
    superlink.until((tmp_path / "run" / "checkpoint").exists, 900, "no round ends")
    link.stop("node-2")
    link.start_node(2)
    assert link.wait(number, tmp_path / "run" / "result.json") == "finished:completed"
    assert_same_run(tmp_path, "fedpac", rounds=3, join_ratio=1.0)
