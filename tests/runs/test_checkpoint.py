"""A run that was stopped goes on bit for bit; damage is found; a disk that fails costs no more than it must."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.federation import Round
from coterie.methods.fedper import FedPer
from coterie.runs import checkpoint, checkpoint_files
from coterie.runs.checkpoint import Snapshot, Writer
from coterie.runs.checkpoint_files import Damaged, from_line, to_line
from coterie.runs.folder import Folder
from tests import toy
from tests.signing import sign

SETTINGS: dict[str, Any] = {"rounds": 4, "join_ratio": 0.6, "seed": 7, "full_last_round": True}


class PowerCut(Exception):
    pass


def run(out: Path, name: str = "fedper", where: Any = "looped", **more: Any) -> coterie.Result:
    given = {"data": toy.toy(validation=(2, 2, 2, 2, 2)), "model": toy.network(), **SETTINGS, **more}
    how = where if isinstance(where, coterie.Execution) else coterie.Execution(where, processes=1)
    return coterie.run(given.pop("method", toy.method(name)), backend=how, out=out, **given)


def stopped(out: Path, after: int, name: str = "fedper", where: Any = "looped", **more: Any) -> Path:
    """Whose power failed in the round after this one; its checkpoint is written."""

    def fail(record: Round) -> None:
        if record.number == after + 1:
            raise PowerCut

    with pytest.raises(PowerCut):
        run(out, name, where, watch=fail, **more)
    return out


def table(out: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with (out / name).open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in csv.DictReader(file)]


def assert_same(a: Path, b: Path) -> None:
    """All that two runs leave, but for how long they took."""
    assert table(a) == table(b)
    assert (a / "clients.csv").read_bytes() == (b / "clients.csv").read_bytes()
    names = sorted(path.name for path in (a / "models").glob("*.safetensors"))
    assert names == sorted(path.name for path in (b / "models").glob("*.safetensors"))
    for name in names:
        toy.assert_same(load_file(a / "models" / name), load_file(b / "models" / name))
    results = [json.loads((out / "result.json").read_text()) | {"seconds": 0} for out in (a, b)]
    assert results[0] == results[1]


@pytest.mark.parametrize("where", ["looped", "stacked"])
def test_masks_of_dropout_go_on_bit_for_bit(where: str, tmp_path: Path) -> None:
    network = toy.network(dropout=0.3)
    run(tmp_path / "whole", "ditto", where, model=network)
    stopped(tmp_path / "cut", 2, "ditto", where, model=network)
    run(tmp_path / "cut", "ditto", where, model=network, exist="resume")
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("after", [0, 1, 3, 4])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_wherever_it_is_stopped(after: int, every: int, tmp_path: Path) -> None:
    """Before the first checkpoint, between two, in the training after the last round."""
    run(tmp_path / "whole", "ditto")
    stopped(tmp_path / "cut", after, "ditto", checkpoint_every=every)
    run(tmp_path / "cut", "ditto", exist="resume", checkpoint_every=every)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_stopped_again_and_again(tmp_path: Path) -> None:
    run(tmp_path / "whole", "apfl")
    stopped(tmp_path / "cut", 1, "apfl")
    for after in (2, 3, 4):
        stopped(tmp_path / "cut", after, "apfl", exist="resume")
    run(tmp_path / "cut", "apfl", exist="resume")
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_states_in_files_and_newcomers(tmp_path: Path) -> None:
    how = coterie.Execution("looped", processes=1, state_dir=str(tmp_path / "states"))
    more = {"data": toy.toy(train=tuple(range(6, 16)), test=tuple(range(6, 16))), "new_clients": 0.4}
    run(tmp_path / "whole", "fedrep", how, **more)
    stopped(tmp_path / "cut", 2, "fedrep", how, **more)
    run(tmp_path / "cut", "fedrep", how, exist="resume", **more)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    assert any(row["new_post_mean"] for row in table(tmp_path / "cut"))


def test_metrics_are_cut_back(tmp_path: Path) -> None:
    out = stopped(tmp_path / "cut", 3, checkpoint_every=2)
    assert [row["round"] for row in table(out)] == ["1", "2", "3", "4"]

    def first(record: Round) -> None:
        assert [row["round"] for row in table(out)] == ["1", "2", "3"]
        raise PowerCut

    with pytest.raises(PowerCut):
        run(out, exist="resume", watch=first, checkpoint_every=2)


def test_only_what_is_needed_is_written(tmp_path: Path) -> None:
    """Of clients those who trained; of checkpoints two."""
    out = stopped(tmp_path / "cut", 3, rounds=12, join_ratio=0.2)
    found = sorted((out / "checkpoint").glob("clients-*"))
    assert found
    assert len(load_file(found[0])["ids"]) <= 3  # one of five a round, and three rounds if two were skipped
    stopped(out, 11, exist="resume", rounds=12, join_ratio=0.2)
    servers = [path.name for path in sorted((out / "checkpoint").glob("server-*"))]
    assert len(servers) == 2  # 10 may have been skipped, if the disk was slow
    assert servers[1] == "server-000011.safetensors"
    assert len(list((out / "checkpoint").glob("clients-*"))) <= 6  # five clients, and one that has since trained again


def test_files_do_not_become_more_and_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ten clients a round: what the oldest files hold is written again."""
    monkeypatch.setattr(checkpoint, "MOST", 2)
    more = {"data": toy.toy(train=(6,) * 10, test=(6,) * 10), "rounds": 12, "join_ratio": 0.1}
    run(tmp_path / "whole", **more)
    out = stopped(tmp_path / "cut", 11, **more)
    assert len(list((out / "checkpoint").glob("clients-*"))) <= 4  # two, the new one, and one of the checkpoint before
    run(out, exist="resume", **more)
    assert_same(tmp_path / "whole", out)


def test_a_finished_run_keeps_its_last_checkpoint_only(tmp_path: Path) -> None:
    """In one file, and without what was replaced; none of it with keep_state=False."""
    run(tmp_path / "r", "ditto", rounds=8)
    names = sorted(path.name for path in (tmp_path / "r" / "checkpoint").iterdir())
    assert names == ["clients-000008.safetensors", "history.jsonl", "server-000008.safetensors"]
    run(tmp_path / "n", "ditto", rounds=8, keep_state=False)
    assert [path.name for path in (tmp_path / "n" / "checkpoint").iterdir()] == ["history.jsonl"]


# Damage


def damage(path: Path, at: int, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[at:]
    else:
        content[at] ^= 1 << at % 8
    path.write_bytes(content)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped(tmp_path_factory.mktemp("cut") / "r", 3)


@pytest.mark.parametrize("how", ["truncated", "flipped"])
@pytest.mark.parametrize("name", ["server-000003.safetensors", "clients-000003.safetensors"])
def test_no_damage_passes(cut: Path, name: str, how: str, tmp_path: Path) -> None:
    """Cut or changed at many places, the start and every part of the header among them: never taken for good."""
    good, copy = cut / "checkpoint" / name, tmp_path / name
    before = checkpoint_files.read(good)
    size = good.stat().st_size
    for at in (*range(0, min(size, 1200), 13), *range(1200, size, max(size // 60, 1)), size - 1):
        shutil.copy(good, copy)
        damage(copy, at, how)
        try:
            tensors, about = checkpoint_files.read(copy)
        except (Damaged, CoterieError):
            continue
        assert how == "flipped"  # a blank of the header is another blank
        assert about == before[1]
        toy.assert_same(tensors, before[0])


def test_no_damage_of_a_line_passes() -> None:
    scores = coterie.run(toy.method("fedper"), toy.toy(), toy.network(), rounds=1, backend="looped").history[0]
    line = to_line(scores)
    assert toy.rows(from_line(line).scores["pre", "test"]) == toy.rows(scores.scores["pre", "test"])
    for at in range(0, len(line), 3):
        flipped = bytearray(line)
        flipped[at] ^= 1 << at % 8
        for wrong in (line[:at], bytes(flipped)):
            with pytest.raises(Damaged):
                from_line(wrong)


@pytest.mark.parametrize("how", ["truncated", "flipped"])
@pytest.mark.parametrize("name", ["server-000003", "clients-000003", "clients-*", "history"])
def test_after_damage_the_checkpoint_before_is_used(
    cut: Path, name: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is damaged, the run ends as it would have; the user is told."""
    run(tmp_path / "whole")
    shutil.copytree(cut, tmp_path / "cut")
    for path in (tmp_path / "cut" / "checkpoint").glob(f"{name}.*"):
        damage(path, path.stat().st_size * 5 // 6, how)
    seen: list[int] = []
    run(tmp_path / "cut", exist="resume", watch=lambda record: seen.append(record.number))
    assert seen[0] == 1 if name == "clients-*" else seen[0] in (2, 3)  # 2, if that of round 2 was skipped
    assert "is damaged" in caplog.text
    assert_same(tmp_path / "whole", tmp_path / "cut")


# A server state that is not finite


@dataclass(frozen=True)
class Ruined(FedPer):
    """From round 3 on the server's state has a number that is not finite."""

    def server_receive(self, server: Any, clients: torch.Tensor, ups: Any) -> Any:
        after = super().server_receive(server, clients, ups)
        Ruined.rounds += 1
        return (
            tree.apply(lambda t: t.index_fill(0, torch.tensor([0]), torch.nan), after) if Ruined.rounds > 2 else after
        )

    rounds: ClassVar[int] = -1  # the rehearsal counts too


def test_a_state_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    """The run stops and says where; the last finite checkpoint is kept, and a run goes on from there."""
    out, spoilt = tmp_path / "r", {"method": Ruined(train=toy.method("fedper").train)}
    with pytest.raises(CoterieError, match=r"round 3: .*not finite.*the checkpoint of round 2 is kept"):
        run(out, **spoilt)
    assert not (out / "result.json").exists()
    assert not (out / "models").exists()
    for path in (out / "checkpoint").glob("*.safetensors"):
        assert tree.not_finite(load_file(path)) == []
    assert (out / "checkpoint" / "server-000002.safetensors").exists()
    Ruined.rounds = -10  # whoever sent nonsense is gone
    seen: list[int] = []
    run(out, exist="resume", watch=lambda record: seen.append(record.number), **spoilt)
    assert seen[0] == 3
    run(tmp_path / "whole")
    for path in (out / "models").glob("*.safetensors"):
        toy.assert_same(load_file(path), load_file(tmp_path / "whole" / "models" / path.name))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_checkpoint_that_is_not_finite_is_passed_over(
    value: float, cut: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an earlier version could write it: resume takes the last finite one."""
    run(tmp_path / "whole")
    shutil.copytree(cut, tmp_path / "cut")
    path = tmp_path / "cut" / "checkpoint" / "server-000003.safetensors"
    tensors, about = checkpoint_files.read(path)
    name = next(iter(tensors))
    tensors[name].view(-1)[-1] = value
    checkpoint_files.write(path, tensors, about)
    seen: list[int] = []
    run(tmp_path / "cut", exist="resume", watch=lambda record: seen.append(record.number))
    assert seen[0] in (2, 3)  # 2, if that of round 2 was skipped
    assert f"the server's state of round 3 is not finite ({name})" in caplog.text
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_no_models_of_a_state_that_is_not_finite(tmp_path: Path) -> None:
    result = run(tmp_path / "r")
    ruined = replace(result, server=tree.apply(lambda t: t * torch.nan, result.server))
    folder = Folder(tmp_path / "other", json.loads((tmp_path / "r" / "config.json").read_text()))
    with pytest.raises(CoterieError, match=r"last state is not finite \(\S+, .*\); no models are written"):
        folder.finish(ruined)
    folder.close()
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["config.json", "log.txt"]


# Refusals


def test_another_run_is_refused(cut: Path, tmp_path: Path) -> None:
    data = toy.toy(validation=(2, 2, 2, 2, 2))
    pixel = data.train.x.clone()
    pixel[0, 0, 0, 0] += 1
    before = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    for named, more in {
        "federation.seed was 7 and is 8": {"seed": 8},
        "method.train.lr was 0.05 and is 0.1": {"method": toy.method("fedper", lr=0.1)},
        "method.name": {"method": toy.method("ditto")},
        "data.content": {"data": replace(data, train=replace(data.train, x=pixel))},
        "execution.precision": {"where": coterie.Execution("looped", processes=1, precision="bf16")},
        "ran.backend": {"where": "stacked"},
    }.items():
        with pytest.raises(CoterieError, match=f"not the run that was started: .*{named}"):
            run(cut, exist="resume", **more)
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == before


def test_another_version_is_refused(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.runs.describe.VERSION", "9.9")
    with pytest.raises(CoterieError, match=r'ran.coterie was ".*" and is "9.9"'):
        run(cut, exist="resume")


def test_a_folder_without_a_run_is_used_if_it_is_empty(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(CoterieError, match="nothing to resume"):
        run(other, exist="resume")
    assert (other / "notes.txt").read_text() == "mine"
    (other / "notes.txt").unlink()
    assert len(run(other, exist="resume").history) == len(run(tmp_path / "new").history)


def test_a_checkpoint_of_another_run_is_refused(cut: Path, tmp_path: Path) -> None:
    """Its configuration is in the checkpoint too."""
    out = stopped(tmp_path / "other", 2, seed=8)
    shutil.copy(cut / "config.json", out)
    sign(out)
    with pytest.raises(CoterieError, match=r"federation.seed was 8 and is 7"):
        run(out, exist="resume")


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    out = stopped(tmp_path / "r", 1)

    def second(record: Round) -> None:
        with pytest.raises(CoterieError, match="another process is using"):
            run(out, exist="resume")

    run(out, exist="resume", watch=second)


# Disks


def test_a_slow_disk_delays_nobody_and_keeps_one_waiting() -> None:
    """While the first is written the others come; only the last of them is written."""
    written, gate = [], threading.Event()

    def write(snapshot: Snapshot) -> None:
        written.append(snapshot.round)
        gate.wait(10)

    writer = Writer(write)
    start = time.monotonic()
    for number in range(1, 6):
        writer.hand(Snapshot(number, {}, torch.zeros(0), {}, ()))
        while not written:
            time.sleep(0.001)
    assert time.monotonic() - start < 5
    gate.set()
    writer.close(wait=True)
    assert written == [1, 5]


def test_skipped_checkpoints_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes two rounds for every checkpoint; clients of a round that was skipped are in the next one."""
    run(tmp_path / "whole", "ditto", rounds=8)
    save, may = checkpoint.Checkpoints._save, threading.Semaphore(0)

    def slow(self: Any, snapshot: Snapshot) -> None:
        may.acquire(timeout=10)
        save(self, snapshot)

    def pace(record: Round) -> None:
        if record.number % 3 == 0:
            may.release()
        if record.number == 8:
            may.release(10)
            raise PowerCut

    monkeypatch.setattr(checkpoint.Checkpoints, "_save", slow)
    with pytest.raises(PowerCut):
        run(tmp_path / "cut", "ditto", rounds=8, watch=pace)
    monkeypatch.undo()
    run(tmp_path / "cut", "ditto", rounds=8, exist="resume")
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def wait_for(words: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 20
    while words not in caplog.text:
        assert time.monotonic() < deadline, f"nobody said '{words}'"
        time.sleep(0.01)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"0" * 4096)
        except OSError:
            pass


def test_a_full_disk(small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Full after round 2, free after round 4: the run goes on, checkpoints and metrics come back."""
    run(tmp_path / "whole", rounds=6)
    out = small_disk / "r"

    def between(record: Round) -> None:
        if record.number == 2:
            fill(small_disk)
        if record.number == 4:
            wait_for("cannot be saved", caplog)
            (small_disk / "ballast").unlink()
        if record.number == 6:
            wait_for("can be written again", caplog)
            raise PowerCut

    with pytest.raises(PowerCut):
        run(out, rounds=6, watch=between)
    assert "No space left" in caplog.text
    assert caplog.text.count("cannot be saved") == 1
    run(out, rounds=6, exist="resume")
    assert_same(tmp_path / "whole", out)


def test_a_disk_that_was_full_before(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(CoterieError, match=r"cannot create the folder .*: No space left"):
        run(small_disk / "r")
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_a_disk_that_stays_full(small_disk: Path, tmp_path: Path) -> None:
    """The last good checkpoint stays, nothing half-written does, and the run says how it can be ended."""
    out = small_disk / "r"
    with pytest.raises(CoterieError, match=r"cannot be written to \(No space left.*coterie resume"):
        run(out, watch=lambda record: fill(small_disk) if record.number == 2 else None)
    assert not (out / "result.json").exists()
    (small_disk / "ballast").unlink()
    seen: list[int] = []
    run(out, exist="resume", watch=lambda record: seen.append(record.number))
    assert seen[0] <= 3
    run(tmp_path / "whole")
    assert_same(tmp_path / "whole", out)


def test_a_folder_that_cannot_be_written_to_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file is where its checkpoints were: it goes on without them, and says so once."""
    out = tmp_path / "r"

    def block(record: Round) -> None:
        while record.number == 2 and not (out / "checkpoint").is_file():  # the thread that saves may be faster
            shutil.rmtree(out / "checkpoint", ignore_errors=True)
            with contextlib.suppress(OSError):
                (out / "checkpoint").write_text("in the way")

    run(out, watch=block)
    run(tmp_path / "whole")
    assert_same(tmp_path / "whole", out)
    assert caplog.text.count("cannot be saved") == 1


def test_a_read_only_folder(small_disk: Path) -> None:
    out = small_disk / "r"
    stopped(out, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, check=True)
    with pytest.raises(CoterieError, match="cannot be written to: Read-only"):
        run(out, exist="resume")
    with pytest.raises(CoterieError, match="cannot create the folder"):
        run(small_disk / "new")


def test_files_of_a_limited_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full disk, for those who cannot mount one: what does not fit is told, the last good checkpoint stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(record: Round) -> None:
        size = 2000 if record.number in (3, 4) else soft
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        if record.number == 4:
            wait_for("cannot be saved: File too large", caplog)
            raise PowerCut

    try:
        with pytest.raises(PowerCut):
            run(tmp_path / "cut", rounds=5, watch=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "cut").rglob("*.part"))
    run(tmp_path / "cut", rounds=5, exist="resume")
    run(tmp_path / "whole", rounds=5)
    assert_same(tmp_path / "whole", tmp_path / "cut")
