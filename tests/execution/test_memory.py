"""Where the memory of clients lives: what is kept comes back, and there is room for many."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.api import Execution
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Weights
from coterie.execution import ClientMemory, Looped, Stacked
from tests import toy

CPU = torch.device("cpu")
places = pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])


def folder(path: Path, in_files: bool) -> str | None:
    return str(path / "states") if in_files else None


def rows(*numbers: float) -> Weights:
    """Row i is filled with the i-th number."""
    t = torch.tensor(numbers, dtype=torch.float32)
    return Weights({"w": t[:, None, None].expand(-1, 2, 3), "b": t}, {"flag": t > 0, "half": t[:, None].bfloat16()})


@places
def test_what_is_kept_comes_back(tmp_path: Path, in_files: bool) -> None:
    states = ClientMemory(5, CPU, folder(tmp_path, in_files))
    states.keep(torch.tensor([0, 1, 2, 3, 4]), rows(0, 1, 2, 3, 4))
    states.keep(torch.tensor([1, 4]), rows(10, -7))
    for client, number in enumerate([0, 10, 2, 3, -7]):
        toy.assert_same(tree.flatten(states[client]), tree.flatten(tree.pick(rows(number), 0)))
    toy.assert_same(tree.flatten(states.take(torch.tensor([3, 1]))), tree.flatten(rows(3, 10)))
    assert states.row_bytes == 2 * 3 * 4 + 4 + 1 + 2
    assert len(list(states)) == len(states) == 5
    with pytest.raises(IndexError):
        states[5]


@places
def test_what_was_taken_is_a_copy(tmp_path: Path, in_files: bool) -> None:
    states = ClientMemory(2, CPU, folder(tmp_path, in_files))
    states.keep(torch.arange(2), rows(1, 2))
    taken, one = states.take(torch.arange(2)), states[0]
    states.keep(torch.arange(2), rows(3, 4))
    toy.assert_same(tree.flatten(taken), tree.flatten(rows(1, 2)))
    toy.assert_same(tree.flatten(one), tree.flatten(tree.pick(rows(1), 0)))


def test_it_is_written_in_place() -> None:
    """A round costs what its participants remember, not what all do."""
    states = ClientMemory(3, CPU)
    states.keep(torch.arange(3), rows(1, 2, 3))
    before = [t.data_ptr() for t in tree.leaves(states.kept)]
    states.keep(torch.tensor([1]), rows(5))
    assert before == [t.data_ptr() for t in tree.leaves(states.kept)]


@places
def test_memories_of_unlike_length_are_filled_up_with_zeros(tmp_path: Path, in_files: bool) -> None:
    states = ClientMemory(3, CPU, folder(tmp_path, in_files))
    states.keep(torch.tensor([1]), {"z": torch.ones(1, 2, 2)})
    states.keep(torch.tensor([0, 2]), {"z": torch.full((2, 3, 2), 2.0)})
    states.keep(torch.tensor([2]), {"z": torch.full((1, 1, 2), 3.0)})
    column = [[2.0, 2.0, 2.0], [1.0, 1.0, 0.0], [3.0, 0.0, 0.0]]
    assert states.take(torch.arange(3))["z"][:, :, 0].tolist() == column


def test_nothing_to_remember() -> None:
    states = ClientMemory(3, CPU)
    states.keep(torch.arange(3), Weights({}, {}))
    assert states[1] == states.take(torch.arange(2)) == Weights({}, {})
    assert states.row_bytes == 0


@pytest.mark.parametrize("kind", [Looped, Stacked])
@pytest.mark.parametrize("name", ["fedper", "knn-per", "fedavg"])
def test_files_change_nothing(kind: Any, name: str, tmp_path: Path) -> None:
    """Also where clients finish with a memory of another form; and nothing is left in the folder."""
    method, model, data = toy.method(name), toy.model(), toy.toy()
    expected, _ = toy.outcome(kind(method, model, data, 7))
    found, _ = toy.outcome(kind(method, model, data, 7, state_dir=str(tmp_path / "new")))
    toy.assert_same(expected, found)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_run_with_files(tmp_path: Path) -> None:
    """The result reads them after the run."""
    settings: dict[str, Any] = {"data": toy.toy(), "rounds": 2}
    plain = coterie.run(toy.method("fedper"), model=toy.network(), backend="looped", **settings)
    how = Execution("looped", state_dir=str(tmp_path))
    kept = coterie.run(toy.method("fedper"), model=toy.network(), backend=how, out=tmp_path / "out", **settings)
    for i in range(5):
        toy.assert_same(plain.personal_weights(i), kept.personal_weights(i))
    assert (tmp_path / "out" / "models" / "client-4.safetensors").exists()


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        states = ClientMemory(3, CPU, str(bad))
        with pytest.raises(CoterieError, match=f"cannot keep .* in the folder {bad}"):
            states.keep(torch.arange(3), rows(1, 2, 3))


def test_a_disk_without_room_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CoterieError, match=r"cannot keep .* No space left on device"):
        ClientMemory(3, CPU, str(tmp_path)).keep(torch.arange(3), rows(1, 2, 3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [Looped, Stacked])
def test_only_a_cohort_is_out_of_the_store_at_a_time(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When joining, training, finishing and in measurements."""
    taken: list[int] = []
    kept: list[int] = []
    take, keep = ClientMemory.take, ClientMemory.keep

    def watched_take(self: ClientMemory, ids: torch.Tensor) -> Any:
        taken.append(len(ids))
        return take(self, ids)

    def watched_keep(self: ClientMemory, ids: torch.Tensor, rows: Any) -> None:
        kept.append(len(ids))
        keep(self, ids, rows)

    monkeypatch.setattr(ClientMemory, "take", watched_take)
    monkeypatch.setattr(ClientMemory, "keep", watched_keep)
    monkeypatch.setattr("coterie.execution.looped.COHORT", 2)
    expected, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy(), join_ratio=1.0)
    taken.clear()
    kept.clear()
    made = {"processes": 1} if kind is Looped else {"cohort": 2}
    found, _ = toy.outcome(kind(toy.method("fedavg"), toy.model(), toy.toy(), 7, **made), join_ratio=1.0)
    assert toy.distance(expected, found) < 1e-10
    assert max(taken) == max(kept) == 2
    assert sum(taken) == 5 * (3 * 3 + 2)  # train, POST, PRE; finish, measured
    assert sum(kept) == 5 * (1 + 3 + 1)  # join; train; finish


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["page-locked", "on-the-gpu"])
@pytest.mark.parametrize("name", ["fedper", "knn-per", "fedavg"])
def test_with_a_gpu(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cohorts of two, so that rows come and go while others are under way."""
    monkeypatch.setattr("coterie.execution.memory.SHARE", share)
    method, model, data = toy.method(name, keep_momentum=True), toy.model(), toy.toy()
    clients = Stacked(method, model, data, 7, device="cuda", cohort=2)
    found, _ = toy.outcome(clients, rounds=5)
    assert clients.states.device.type == "cuda"
    expected, _ = toy.looped(method, model, data, rounds=5)
    assert toy.distance(expected, {name: t.cpu() for name, t in found.items()}) < 1e-10


def fresh(script: str) -> str:
    """What a Python process of its own prints."""
    code = "import resource, torch\nfrom tests import toy\n" + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["Looped", "Stacked"])
def test_memory_does_not_grow_with_rounds(kind: str) -> None:
    """A thousand rounds of a tiny model: less than 4 MB more after the first two hundred."""
    grown = fresh(f"""
        from coterie.execution import {kind}, Turn
        from coterie.execution.requests import send
        from coterie.core import random

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        data = toy.toy(train=(4, 6, 4, 5, 3, 6), test=(1,) * 6, augmented=False)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 4))
        model = toy.make_model(torch.nn.Sequential(*net), toy.SHAPE, toy.CLASSES)
        clients = {kind}(toy.method("fedper", local_epochs=1, keep_momentum=True), model, data, 0)
        server = clients.method.server_init(clients.model, clients.census)
        clients.join({{}})
        for number in range(1000):
            joined = random.participants(0, number, 6, 3)
            answers = clients.train(joined, send(clients.method, server, joined), Turn(number))
            server = clients.method.server_receive(server, answers.clients, answers.ups)
            if number == 200:
                before = resident()
        print(resident() - before)
        clients.close()
    """)
    assert int(grown) < 4e6


@pytest.mark.slow
def test_many_clients_with_a_personal_head() -> None:
    """100,000 heads of 1290 numbers: two rounds of a hundred, all measured once, within 2 GB."""
    peak = fresh("""
        from coterie.execution import Looped
        from coterie.core.data import FederatedData, Split
        from coterie.federation import Settings, federate

        m = 100_000
        y = torch.arange(m) % 10
        split = Split(torch.randint(0, 256, (m, 1, 2, 2), dtype=torch.uint8), y, (1,) * m)
        data = FederatedData("many", 10, split, split)
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 128), torch.nn.Linear(128, 10))
        model = toy.make_model(network, (1, 2, 2), 10)
        clients = Looped(toy.method("fedper", local_epochs=1, momentum=0.0), model, data, 0, processes=1)
        federate(clients, Settings(rounds=2, join_ratio=0.001, evaluate_every=2))
        assert clients.states.row_bytes == 1290 * 4
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        clients.close()
    """)
    assert int(peak) < 2e6  # kilobytes
