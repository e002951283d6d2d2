"""Federations over a real broker, with real processes: the same numbers as in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import coterie
from coterie.api.saved_run import load_run
from coterie.personal.samples import read_samples
from coterie.personal.use import predict
from tests.machines import FAST, HELD, Machines, assert_same_server, samples, simulated

pytestmark = pytest.mark.network

FIVE = {"rounds": 5, "join_ratio": 0.5, "seed": 3}
FLAGS = ("--rounds", "5", "--join-ratio", "0.5", "--seed", "3")


def federation(machines: Machines, method: str) -> None:
    devices = machines.join_all()
    server = machines.serve(method, *FLAGS)
    assert server.end() == 0, server.said
    for device in devices.values():
        assert device.end() == 0, device.said
        assert "the federation has ended; the models of clients" in device.said
    assert not any(machines.left_out.values())


@pytest.mark.parametrize("method", ["fedpac", "ditto"])
def test_the_same_as_a_run(method: str, machines: Machines) -> None:
    """The server's state, and every prediction of every client's own model."""
    federation(machines, method)
    run = machines.folder / "run"
    where = coterie.Execution("looped", processes=1)
    coterie.run(method, samples(), "linear", backend=where, out=run, **FIVE)  # type: ignore[arg-type]
    assert_same_server(machines.out, load_file(run / "models" / "server.safetensors"))
    images = machines.folder / "images.npz"
    np.savez(images, x=samples().test.x[:20].numpy())
    for device, clients in {"one": (0, 3), "two": (1,), "three": (2, 4, 5)}.items():
        for client in clients:
            found, expected = (predictions(folder, client, images) for folder in (machines.personal(device), run))
            assert found == expected
            assert len(found) == 20


def predictions(folder: Path, client: int, images: Path) -> list[dict[str, Any]]:
    """As `coterie predict` makes them."""
    run = load_run(folder)
    return predict(run, client, read_samples(run, [images]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedreg", "scaffold", "fedpac-proto"])
def test_the_same_server_with_other_methods(method: str, machines: Machines) -> None:
    federation(machines, method)
    assert_same_server(machines.out, simulated(method, **FIVE))


@pytest.mark.slow
def test_as_typed(machines: Machines) -> None:
    """Commands as a user types them, each in a Python of its own."""
    program = [sys.executable, "-m", "coterie"]
    data = ("--num-clients", "6", "--local-size", "30", "--test-size", "20")
    begun = [
        subprocess.Popen([*program, "join", "--device", name, "--clients", clients, "--dir", name, *machines.at, *data],
                         cwd=machines.folder)
        for name, clients in HELD.items()
    ]  # fmt: skip
    try:
        given = ("--model", "linear", "--num-clients", "6", "--out", "served", *machines.at, *FAST, *FLAGS)
        subprocess.run([*program, "serve", "fedper", *given], cwd=machines.folder, check=True, timeout=120)
        assert [process.wait(60) for process in begun] == [0, 0, 0]
    finally:
        for process in begun:
            process.kill()
            process.wait()
    assert_same_server(machines.out, simulated("fedper", **FIVE))
    assert {path.name for path in machines.folder.iterdir()} >= {"served", *HELD}
