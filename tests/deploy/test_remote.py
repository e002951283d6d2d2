"""Letters and answers that are late, lost, repeated or wrong, and devices that forget: without a network.

What comes out is compared, to the last bit, with clients of one process of whom the same did not answer.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.api import drive
from coterie.clients import remote as remote_clients
from coterie.clients.base import send
from coterie.clients.remote import Answer, Event, Gone, Here, Patience, Remote
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.deploy.device import Device
from coterie.deploy.store import KEPT, Store
from coterie.federation import Safety, Settings, disk, federate
from coterie.network.letters import Letter
from tests import direct, toy
from tests.machines import Missing

SETTINGS = Settings(rounds=4, join_ratio=1.0, seed=7)
PATIENCE = Patience(deadline=60, grace=5, wait=60)
At = tuple[int, int]  # round, client


class Clock:
    """Time goes on only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(remote_clients, "time", made)
    return made


class Bad(direct.Direct):
    """A post with faults: (round, client) -> what happens to the letter to train, or to its answer."""

    def __init__(self, devices: list[Device], folder: Path, faults: dict[At, str]) -> None:
        super().__init__(devices)
        self.folder, self.faults = folder, dict(faults)
        self.later: list[Event] = []
        self.shuffled: random.Random | None = None

    def plan(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        self.events += self.later
        self.later = []

    def send(self, client: int, letter: Letter) -> None:
        fault = self.faults.pop((letter.header.round, client), "") if letter.header.kind == "train" else ""
        if fault in ("restarted", "disk lost"):
            self.restart(client, lost=fault == "disk lost")
        if fault == "letter lost":
            return
        answer = Answer(client, self.devices[client].answer(letter.own, letter.shared)[0])
        if fault == "late":
            self.later.append(answer)
        elif fault == "vanished and back":
            self.events += [Gone((client,)), Here((client,))]
        elif fault == "vanished":
            self.events.append(Gone((client,)))
        elif fault != "answer lost":
            self.events.append(answer)
        if fault == "repeated":
            self.events += [answer, answer]
            self.later += [answer, answer]

    def receive(self, seconds: float) -> Event | None:
        if self.shuffled and self.events:
            self.events.rotate(self.shuffled.randrange(len(self.events)))
        if not self.events:
            remote_clients.time.now += seconds  # type: ignore[attr-defined]
        return super().receive(seconds)

    def restart(self, client: int, lost: bool) -> None:
        """The device of this client, as a new process."""
        old = self.devices[client]
        if lost:
            shutil.rmtree(old.store.folder)
        new = Device(old.agreement, old.data, old.ids, Store(old.store.folder))
        self.devices |= dict.fromkeys(new.ids, new)


class Forgetful(Missing):
    """Clients of one process who begin anew in some rounds."""

    anew: set[At] = set()  # noqa: RUF012

    def join(self, welcome: tree.Tree) -> None:
        super().join(welcome)
        self.first = {client: self.state(client) for client in range(self.count)}

    def begin(self, clients: torch.Tensor, downs: Any, turn: Any) -> Any:
        for round, client in self.anew:
            if round == turn.round:
                self.states[client] = self.first[client]
        return super().begin(clients, downs, turn)


def federation(name: str, folder: Path, faults: dict[At, str], patience: Patience = PATIENCE) -> Remote:
    method, model, data = direct.small(name)
    deal = direct.agreement(method, model, data)
    post = Bad(direct.devices(deal, data, folder), folder, faults)
    return Remote(deal, direct.census(data), post, patience)


def simulation(name: str, out: set[At], anew: set[At] = frozenset()) -> tuple[tree.Tree, Forgetful]:  # type: ignore[assignment]
    method, model, data = direct.small(name)
    clients = Forgetful(method, model, data, 7, processes=1)
    clients.left_out = {round: {c for r, c in out if r == round} for round, _ in out}
    clients.anew = anew
    server, _ = federate(clients, SETTINGS)
    return tree.flatten({"server": server}), clients


def assert_same(remote: Remote, server: Any, expected: tree.Tree, clients: Forgetful) -> None:
    """The server, and what every client remembers on its device."""
    toy.assert_same(expected, tree.flatten({"server": server}))
    post: Any = remote.post
    for client, device in post.devices.items():
        state = device._state(client, remote.version(client))
        toy.assert_same(tree.flatten({"s": state}), tree.flatten({"s": toy.unpadded(clients.state(client))}))


CASES: dict[str, set[At]] = {  # who is left out then
    "letter lost": {(1, 3)},
    "answer lost": {(1, 3)},
    "late": {(1, 3)},
    "vanished": {(1, 3)},
    "vanished and back": set(),
    "repeated": set(),
    "restarted": set(),
}


@pytest.mark.parametrize(("name", "fault"), [*(("fedper", fault) for fault in CASES), ("scaffold", "late")])
def test_faults(name: str, fault: str, tmp_path: Path) -> None:
    remote = federation(name, tmp_path, {(1, 3): fault})
    server, history = federate(remote, SETTINGS)
    expected, clients = simulation(name, CASES[fault])
    assert_same(remote, server, expected, clients)
    assert [record.left_out for record in history] == [(), (3,) if CASES[fault] else (), (), ()]


def test_all_at_once_and_in_any_order(tmp_path: Path) -> None:
    faults = {(0, 1): "late", (0, 2): "repeated", (1, 0): "answer lost", (1, 3): "restarted", (2, 4): "late",
              (2, 1): "vanished and back", (3, 2): "letter lost"}  # fmt: skip
    remote = federation("scaffold", tmp_path, faults)
    post: Any = remote.post
    post.shuffled = random.Random(5)
    server, _ = federate(remote, SETTINGS)
    expected, clients = simulation("scaffold", {(0, 1), (1, 0), (2, 4), (3, 2)})
    assert_same(remote, server, expected, clients)
    assert any("it answers to" in reason or "it is of round" in reason for _, reason in post.refused)


@pytest.mark.parametrize("name", ["fedper", "ditto", "scaffold"])
def test_a_device_whose_disk_is_lost_begins_anew(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Device 0 has clients 0 and 3; both have lost what they remembered."""
    remote = federation(name, tmp_path, {(2, 0): "disk lost"})
    server, history = federate(remote, SETTINGS)
    expected, clients = simulation(name, set(), {(2, 0), (2, 3)})
    assert_same(remote, server, expected, clients)
    assert not any(record.left_out for record in history)
    assert "client 0 begins anew" in caplog.text


def test_a_late_word_of_trouble_counts_for_its_own_letter_only(tmp_path: Path) -> None:
    """Its client did not train, so the next letter starts from the same version."""
    remote = federation("fedper", tmp_path, {})
    post: Any = remote.post
    device = post.devices[2]
    honest, kept = device.answer, list[bytes]()

    def moody(own: bytes, shared: bytes) -> tuple[bytes, bool]:
        header = device.agreement.header_of(own)
        if (header.kind, header.round, header.client) == ("train", 1, 2):
            kept.append(device.agreement.trouble(header, "no"))
            return kept[0], True
        post.later += [Answer(2, message) for message in kept]
        return honest(own, shared)  # type: ignore[no-any-return]

    device.answer = moody
    server, history = federate(remote, SETTINGS)
    assert [record.left_out for record in history] == [(), (2,), (), ()]
    expected, clients = simulation("fedper", {(1, 2)})
    device.answer = honest
    assert_same(remote, server, expected, clients)


def test_a_client_whose_update_is_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says so, and is left out at once, not at the deadline."""
    remote = federation("fedper", tmp_path, {})
    post: Any = remote.post
    work = post.devices[1].desk.work

    def diverged(job: Any, client: int, state: Any, down: Any, key: Any) -> Any:
        found = work(job, client, state, down, key)
        return tree.apply(lambda t: t * torch.nan, found) if (job.task, job.turn.round) == ("train", 2) else found

    post.devices[1].desk.work = diverged
    server, history = federate(remote, SETTINGS)
    assert [record.left_out for record in history] == [(), (), (1,), ()]
    assert "client 1 did not train: its update is not finite" in caplog.text
    expected, clients = simulation("fedper", {(2, 1)})
    assert_same(remote, server, expected, clients)


def test_numbers_too_large_to_travel_are_said_at_once(tmp_path: Path) -> None:
    method, model, data = direct.small("fedavg")
    deal = direct.agreement(method, model, data, compress="fp16")
    devices = direct.devices(deal, data, tmp_path)
    work = devices[1].desk.work

    def large(job: Any, *given: Any) -> Any:
        found = work(job, *given)
        return (found[0], tree.apply(lambda t: t + 1e6, found[1])) if job.task == "train" else found

    devices[1].desk.work = large  # type: ignore[method-assign]
    remote = Remote(deal, direct.census(data), direct.Direct(devices), Patience(deadline=600))
    _, history = federate(remote, Settings(rounds=2, seed=7))
    assert [record.left_out for record in history] == [(1,), (1,), ()]  # the last one: fine-tuning


@pytest.mark.parametrize("compress", ["fp16", "bf16", "zstd"])
def test_compressed(compress: str, tmp_path: Path) -> None:
    """Near the truth by the error of a half float, without loss the same."""
    if compress == "zstd":
        pytest.importorskip("zstandard")
    method, model, data = direct.small("fedavg")
    deal = direct.agreement(method, model, data, compress=compress)
    remote = Remote(deal, direct.census(data), direct.Direct(direct.devices(deal, data, tmp_path)), direct.PATIENCE)
    server, _ = federate(remote, Settings(rounds=1, seed=7))
    expected, _ = toy.looped(method, model, data, rounds=1, join_ratio=1.0)
    gap = toy.distance({n: t for n, t in expected.items() if n.startswith("server")}, tree.flatten({"server": server}))
    assert gap == 0 if compress == "zstd" else 0 < gap < 0.02


def test_a_flood_does_not_move_the_deadline(tmp_path: Path, clock: Clock) -> None:
    """One client never answers, and somebody never stops talking in its name."""
    remote = federation("fedavg", tmp_path, {(0, 2): "letter lost"})
    post: Any = remote.post
    receive, count = post.receive, [0]

    def flooded(seconds: float) -> Event | None:
        clock.now += 0.5
        count[0] += 1
        return receive(seconds) if post.events else Answer(2, b"nonsense")

    post.receive = flooded
    _, history = federate(remote, Settings(rounds=1, seed=7, full_last_round=False))
    assert history[0].left_out == (2,)
    assert count[0] < 1000


def test_who_begins_anew_when_measured_does_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients 0 and 3 lose what they remembered while they are not asked to train."""
    remote = federation("fedper", tmp_path, {})
    post: Any = remote.post

    def watch(record: Any) -> None:
        if record.number == 4:
            post.restart(0, lost=True)

    federate(remote, SETTINGS, watch)
    downs = send(remote.method, remote.method.server_init(remote.model, remote.census), remote.everyone)
    for _ in range(2):
        remote.scored = ((), {})
        assert len(remote.score(remote.everyone, downs, "test").clients) == 5
    assert caplog.text.count("client 0 begins anew") == 1


# Too few, and on from the checkpoint.


def test_too_few_answers_stop_it_and_it_goes_on_from_there(tmp_path: Path) -> None:
    lost = {(2, client): "answer lost" for client in (0, 1, 3, 4)}
    remote = federation("scaffold", tmp_path / "devices", lost)
    with pytest.raises(CoterieError, match=r"round 3: 4 of 5 clients did not answer.*checkpoint of round 2 is kept"):
        driven(remote, tmp_path / "out", resume=False)
    again = Remote(remote.agreement, remote.census, remote.post, PATIENCE)
    result = driven(again, tmp_path / "out", resume=True)
    expected, clients = simulation("scaffold", set())
    assert_same(again, result.server, expected, clients)
    assert len(result.history) == 4


def test_nobody_there(tmp_path: Path) -> None:
    remote = federation("fedavg", tmp_path, {})
    post: Any = remote.post
    post.absent = {1}
    with pytest.raises(CoterieError, match=r"only 4 of 5 clients are there, and 5 are needed.*\(--wait\)"):
        federate(remote, SETTINGS)


def driven(remote: Remote, out: Path, resume: bool) -> Any:
    about = {"network": {"name": None, "head": None}, "data": {"name": "toy", "classes": 4, "class_names": []}}
    return drive(remote, None, SETTINGS, Safety(), out, resume, lambda record: None, about)


# What a device keeps.


def state(value: float) -> tree.Tree:
    return {"head": torch.full((3,), value)}


def test_the_last_versions_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    versions = [f"{i:064x}"[::-1] for i in range(6)]
    for i, version in enumerate(versions):
        store.keep(0, version, state(i))
    again = Store(tmp_path)
    found = [again.find(0, version) for version in versions]
    assert [t is not None for t in found] == [False] * (6 - KEPT) + [True] * KEPT
    assert found[-1] is not None
    toy.assert_same(found[-1], state(5))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another version"])
def test_a_damaged_file_is_not_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, version, other = Store(tmp_path), "ab" * 32, "ab" * 16 + "cd" * 16
    store.keep(0, version, state(1))
    (path,) = tmp_path.glob("client-0/*")
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[-1] ^= 1
    path.write_bytes({"cut": content[:-5], "empty": b""}.get(damage, content))
    assert Store(tmp_path).find(0, other if damage == "another version" else version) is None
    assert damage == "another version" or "checksum" in caplog.text or "cannot be read" in caplog.text


def test_a_full_disk_is_trouble_not_a_half_written_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is left out while there is no room, goes on from what it remembered then, and nothing is half."""
    remote = federation("fedper", tmp_path, {})
    real, full = os.replace, [False]

    def replace(source: Any, target: Any) -> None:
        if full[0] and "device-1" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(disk.os, "replace", replace)

    def watch(record: Any) -> None:
        full[0] = record.number == 1  # in the second round

    server, history = federate(remote, SETTINGS, watch)
    assert [record.left_out for record in history] == [(), (1,), (), ()]
    assert not list(tmp_path.rglob("*.part"))
    expected, clients = simulation("fedper", {(1, 1)})
    assert_same(remote, server, expected, clients)
