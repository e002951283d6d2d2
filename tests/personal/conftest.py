from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import coterie
from coterie.federation import Result
from coterie.personal.run import Run, load_run
from tests import toy

NETWORK = "tests.toy:network"  # a network that has a name
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


def train(name: str, out: Path) -> tuple[Run, Result]:
    result = coterie.run(toy.method(name), NETWORK, toy.toy(), rounds=2, join_ratio=0.6, where="looped", out=out)
    return load_run(out), result
