from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import coterie
from coterie.api.result import Result
from coterie.runs.finding import load_run
from coterie.runs.run import Run
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
    result = coterie.run(toy.method(name), toy.toy(), NETWORK, rounds=2, join_ratio=0.6, backend="looped", out=out)
    return load_run(out, NETWORK), result
