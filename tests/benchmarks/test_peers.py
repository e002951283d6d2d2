"""The simulators that are compared do the same work, and the page says what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.peers import page
from benchmarks.peers.coterie_fedavg import Coterie
from benchmarks.peers.plain_fedavg import Plain
from benchmarks.peers.shared import SHARED_WORK, TESTS, SharedWork, cpu_seconds

TINY = SharedWork("tiny", (1, 8, 8), clients=4, samples=6, batch=6, rounds=1, lr=0.1)


@pytest.mark.parametrize(
    "work", [TINY, SharedWork("tiny", (3, 32, 32), clients=2, samples=4, batch=4, rounds=1, lr=0.1)]
)
def test_both_loops_take_the_same_steps(work: SharedWork) -> None:
    """One batch per client and round, so that the order of samples does not matter."""
    ours, plain = Coterie(work), Plain(work)
    x = work.data()[2].float() / 255
    before = plain.answer(x).detach().clone()
    assert torch.equal(ours.answer(x).detach(), before)
    for simulator in (ours, plain):
        simulator.rounds(3)
    after = plain.answer(x).detach()
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(ours.answer(x).detach(), after, rtol=0, atol=1e-5)


def test_data_are_the_same_in_every_process_and_can_be_learned() -> None:
    x, y, x_test, _ = TINY.data()
    assert (x.shape, len(y), len(x_test)) == ((24, 1, 8, 8), 24, TESTS)
    assert all(torch.equal(a, b) for a, b in zip(TINY.data(), TINY.data(), strict=True))
    assert [len(part) for part, _ in TINY.parts()] == [6] * 4
    plain = Plain(TINY)
    before = TINY.accuracy(plain.answer)
    plain.rounds(30)
    assert TINY.accuracy(plain.answer) > before + 0.1


def test_steps_of_the_tasks() -> None:
    assert {name: work.steps for name, work in SHARED_WORK.items()} == {"cnn-20": 2 * 20 * 10, "mlp-100": 3 * 100 * 10}


def test_cpu_time_counts_the_processes_that_were_started() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", busy]
    before, own = cpu_seconds(), time.process_time()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        added = cpu_seconds() - before - (time.process_time() - own)
        child.communicate("\n")
    assert added == pytest.approx(0.5, abs=0.1)


def test_the_page_compares_within_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(version: str, *cpu: float) -> dict[str, object]:
        return {
            "version": version,
            "torch": "2",
            "python": "3",
            "seconds": [2 * c for c in cpu],
            "cpu_seconds": list(cpu),
            "accuracy": [0.1, 0.5, 0.9],
        }

    found = {"Coterie": entry("", 1.0, 2.0, 4.0), "other": entry("7.1", 3.0, 2.0, 8.0)}
    origin = {"machine": "abacus", "commit": "abc", "date": "today", "load": [1.0, 3.0]}
    content = {"small": {**origin, "about": "a work", "rounds": 2, "steps": 4000, "simulators": found}}
    path = tmp_path / "peers.json"
    monkeypatch.setattr(page, "RESULTS", path)
    assert page.page() == "Not measured yet."
    path.write_text(json.dumps(content), encoding="utf-8")
    lines = page.page().splitlines()
    assert "`small`: a work; 2 rounds of one epoch, 4,000 SGD steps. abacus; commit abc" in lines[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert cells[0] == ["Coterie", "this commit", "2", "3", "2", "4", "1.00", "10.0"]
    assert cells[1] == ["other", "7.1", "2", "3", "3", "6", "2.00 (1.00 to 3.00)", "10.0"]
