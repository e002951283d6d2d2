from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import coterie
from coterie.api.result import Result
from coterie.api.saved_run import Run, load_run
from coterie.methods import METHODS
from tests import toy

NETWORK, NORM_NETWORK = "tests.toy:network", "tests.toy:norm_network"  # networks that have names
Made = Callable[[str], tuple[Run, Result]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run of a method, from its folder and as it was; each is made once."""
    base, kept = tmp_path_factory.mktemp("runs"), dict[str, tuple[Run, Result]]()

    def make(name: str) -> tuple[Run, Result]:
        if name not in kept:
            kept[name] = train(name, base / name)
        return kept[name]

    return make


def network_name(method: str) -> str:
    return NORM_NETWORK if METHODS[method].needs_norm else NETWORK


def train(name: str, out: Path) -> tuple[Run, Result]:
    network = network_name(name)
    result = coterie.run(toy.method(name), toy.toy(), network, rounds=2, join_ratio=0.6, backend=toy.IN_TURN, out=out)
    return load_run(out, network), result
