"""Settings of the whole process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.execution.backend import set_precision
from coterie.execution.process import restored
from tests import toy


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
def test_stacked_clients_keep_freed_memory() -> None:
    """Each page that the system hands out again is a fault, 16384 of them in 64 MB."""
    script = """
import resource, torch
from coterie.execution import Stacked
from tests import toy
Stacked(toy.method("fedavg"), toy.model(), toy.toy(), 0)
for _ in range(5):
    torch.ones(2**24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    faults = list(map(int, done.stdout.split()))
    assert faults[-1] - faults[-3] < 1000


@pytest.fixture
def mine() -> Iterator[tuple[Any, ...]]:
    """Settings of a user, whose own networks run on three threads, in TF32 and with cuDNN's benchmarks."""
    with restored():
        torch.set_num_threads(3)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
        yield settings()


def settings() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("backend", ["looped", "stacked"])
@pytest.mark.parametrize("fails", [False, True], ids=["finished", "failed"])
def test_a_run_leaves_the_settings_of_torch(backend: str, fails: bool, mine: tuple[Any, ...]) -> None:
    during = []

    def watch(record: coterie.Round) -> None:
        during.append(settings())
        if fails:
            raise ValueError("enough")

    how = coterie.Execution(backend, "cpu", deterministic=True, processes=1)
    try:
        coterie.run("fedavg", toy.toy(), toy.network(), rounds=1, backend=how, watch=watch)
    except ValueError:
        assert fails
    there = during[0]
    assert [a != b for a, b in zip(there, mine, strict=True)] == [backend == "looped", *[True] * 4, False, True]
    assert settings() == mine


@pytest.mark.parametrize(
    "choose",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    ],
    ids=["default", "older-interface", "newer-interface"],
)
def test_the_precision_is_restored(choose: Callable[[], None]) -> None:
    def precisions() -> list[str]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return [part.fp32_precision for part in (matmul, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul)]

    with restored():
        choose()
        mine = precisions()
        with restored():
            set_precision("fp32", torch.device("cpu"))
            assert precisions()[0] == "ieee"
        assert precisions() == mine
