"""Federations of real processes, ended whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.deploy.certs import make_certificates
from tests.machines import MOSQUITTO, Machines, free_port


@pytest.fixture
def mosquitto() -> None:
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")


@pytest.fixture
def machines(tmp_path: Path, mosquitto: None) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.close()


@pytest.fixture
def secure(tmp_path: Path, mosquitto: None) -> Iterator[Machines]:
    """A broker with certificates and a list of rights, as `coterie certs` makes them."""
    port, folder = free_port(), tmp_path / "certs"
    make_certificates(folder, ["one", "two", "three"], "127.0.0.1", port, 30)
    found = Machines(tmp_path, (folder / "mosquitto.conf").read_text(), port)
    yield found
    found.close()
