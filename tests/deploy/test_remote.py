"""Requests and answers that are late, lost, repeated or wrong, and devices that lose their state, in one process.

The result must equal, bit for bit, a simulation in which the same clients did not answer.
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
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.deploy import pending as pending_requests
from coterie.deploy import remote as remote_clients
from coterie.deploy.device import Device
from coterie.deploy.messages import Message
from coterie.deploy.pending import Timeouts
from coterie.deploy.remote import Remote
from coterie.deploy.store import KEPT, Store
from coterie.deploy.transports.interface import AnswerReceived, DeviceConnected, DeviceDisconnected, Event
from coterie.execution.requests import send
from coterie.federation import Safety, Settings, federate
from coterie.runs import disk
from tests import direct, toy
from tests.machines import Missing

SETTINGS = Settings(rounds=4, join_ratio=1.0, seed=7)
TIMEOUTS = Timeouts(deadline=60, grace=5, wait=60)
At = tuple[int, int]  # round, client


class Clock:
    """Time advances only while the server waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (remote_clients, pending_requests):
        monkeypatch.setattr(module, "time", made)
    return made


class Bad(direct.Direct):
    """A transport with faults: (round, client) -> what happens to the request to train, or to its answer."""

    def __init__(self, devices: list[Device], folder: Path, faults: dict[At, str]) -> None:
        super().__init__(devices)
        self.folder, self.faults = folder, dict(faults)
        self.later: list[Event] = []
        self.shuffled: random.Random | None = None

    def announce_phase(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        self.events += self.later
        self.later = []

    def send(self, client: int, request: Message) -> None:
        fault = self.faults.pop((request.header.round, client), "") if request.header.kind == "train" else ""
        if fault in ("restarted", "disk lost"):
            self.restart(client, lost=fault == "disk lost")
        if fault == "request lost":
            return
        answer = AnswerReceived(client, self.devices[client].answer(request.own, request.shared)[0])
        if fault == "late":
            self.later.append(answer)
        elif fault == "reconnected":
            self.events += [DeviceDisconnected((client,)), DeviceConnected((client,))]
        elif fault == "disconnected":
            self.events.append(DeviceDisconnected((client,)))
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
    """Clients of one process who start over in some rounds."""

    restarts: set[At] = set()  # noqa: RUF012

    def join(self, welcome: tree.Tree) -> None:
        super().join(welcome)
        self.first = {client: self.states[client] for client in range(self.num_clients)}

    def begin(self, clients: torch.Tensor, downs: Any, turn: Any) -> Any:
        for round, client in self.restarts:
            if round == turn.round:
                self.states[client] = self.first[client]
        return super().begin(clients, downs, turn)


def federation(name: str, folder: Path, faults: dict[At, str], timeouts: Timeouts = TIMEOUTS) -> Remote:
    method, model, data = direct.small(name)
    agreement = direct.agreement(method, model, data)
    transport = Bad(direct.devices(agreement, data, folder), folder, faults)
    return Remote(agreement, direct.census(data), transport, timeouts)


def simulation(name: str, out: set[At], restarts: set[At] = frozenset()) -> tuple[tree.Tree, Forgetful]:  # type: ignore[assignment]
    method, model, data = direct.small(name)
    clients = Forgetful(method, model, data, 7, processes=1)
    clients.left_out = {round: {c for r, c in out if r == round} for round, _ in out}
    clients.restarts = restarts
    server, _ = federate(clients, SETTINGS)
    return tree.flatten({"server": server}), clients


def assert_same(remote: Remote, server: Any, expected: tree.Tree, clients: Forgetful) -> None:
    """The server, and what every client remembers on its device."""
    toy.assert_same(expected, tree.flatten({"server": server}))
    transport: Any = remote.transport
    for client, device in transport.devices.items():
        state = device._state(client, remote.version(client))
        toy.assert_same(tree.flatten({"s": state}), tree.flatten({"s": toy.unpadded(clients.states[client])}))


CASES: dict[str, set[At]] = {  # who is left out then
    "request lost": {(1, 3)},
    "answer lost": {(1, 3)},
    "late": {(1, 3)},
    "disconnected": {(1, 3)},
    "reconnected": set(),
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
              (2, 1): "reconnected", (3, 2): "request lost"}  # fmt: skip
    remote = federation("scaffold", tmp_path, faults)
    transport: Any = remote.transport
    transport.shuffled = random.Random(5)
    server, _ = federate(remote, SETTINGS)
    expected, clients = simulation("scaffold", {(0, 1), (1, 0), (2, 4), (3, 2)})
    assert_same(remote, server, expected, clients)
    assert any("earlier request" in reason or "answer of " in reason for _, reason in transport.refused)


@pytest.mark.parametrize("name", ["fedper", "ditto", "scaffold"])
def test_a_device_whose_disk_is_lost_starts_over(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Device 0 has clients 0 and 3; both have lost what they remembered."""
    remote = federation(name, tmp_path, {(2, 0): "disk lost"})
    server, history = federate(remote, SETTINGS)
    expected, clients = simulation(name, set(), {(2, 0), (2, 3)})
    assert_same(remote, server, expected, clients)
    assert not any(record.left_out for record in history)
    assert "client 0 starts over" in caplog.text


def test_a_late_error_counts_for_its_own_request_only(tmp_path: Path) -> None:
    """Its client did not train, so the next request starts from the same version."""
    remote = federation("fedper", tmp_path, {})
    transport: Any = remote.transport
    device = transport.devices[2]
    honest, kept = device.answer, list[bytes]()

    def moody(own: bytes, shared: bytes) -> tuple[bytes, bool]:
        header = device.agreement.header_of(own)
        if (header.kind, header.round, header.client) == ("train", 1, 2):
            kept.append(device.agreement.error(header, "no"))
            return kept[0], True
        transport.later += [AnswerReceived(2, message) for message in kept]
        return honest(own, shared)  # type: ignore[no-any-return]

    device.answer = moody
    server, history = federate(remote, SETTINGS)
    assert [record.left_out for record in history] == [(), (2,), (), ()]
    expected, clients = simulation("fedper", {(1, 2)})
    device.answer = honest
    assert_same(remote, server, expected, clients)


def test_a_client_whose_update_is_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It reports the error, and is left out at once rather than at the deadline."""
    remote = federation("fedper", tmp_path, {})
    transport: Any = remote.transport
    work = transport.devices[1].runner.work

    def diverged(request: Any, client: int, state: Any, down: Any, key: Any) -> Any:
        found = work(request, client, state, down, key)
        return (
            tree.apply(lambda t: t * torch.nan, found)
            if (request.action, request.turn.round) == ("train", 2)
            else found
        )

    transport.devices[1].runner.work = diverged
    server, history = federate(remote, SETTINGS)
    assert [record.left_out for record in history] == [(), (), (1,), ()]
    assert "client 1 did not train: its update is not finite" in caplog.text
    expected, clients = simulation("fedper", {(2, 1)})
    assert_same(remote, server, expected, clients)


def test_scores_of_other_samples_than_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A device that reports scores of more test samples than its hello said would weigh more in every mean."""
    remote = federation("fedper", tmp_path, {})
    real = direct.small("fedper")[2].test.sizes
    remote.held = {"test": [n - (client == 1) for client, n in enumerate(real)]}
    _, history = federate(remote, SETTINGS)
    measured = [scores.clients.tolist() for record in history for scores in record.scores.values()]
    assert measured
    assert all(clients and 1 not in clients for clients in measured)
    assert f"scores of {real[1]} test samples, but the client announced {real[1] - 1}" in caplog.text


def test_values_too_large_for_fp16_are_reported_at_once(tmp_path: Path) -> None:
    method, model, data = direct.small("fedavg")
    agreement = direct.agreement(method, model, data, compress="fp16")
    devices = direct.devices(agreement, data, tmp_path)
    work = devices[1].runner.work

    def large(request: Any, *given: Any) -> Any:
        found = work(request, *given)
        return (found[0], tree.apply(lambda t: t + 1e6, found[1])) if request.action == "train" else found

    devices[1].runner.work = large  # type: ignore[method-assign]
    remote = Remote(agreement, direct.census(data), direct.Direct(devices), Timeouts(deadline=600))
    _, history = federate(remote, Settings(rounds=2, seed=7))
    assert [record.left_out for record in history] == [(1,), (1,), ()]  # the last one: fine-tuning


@pytest.mark.parametrize("compress", ["fp16", "bf16", "zstd"])
def test_compressed(compress: str, tmp_path: Path) -> None:
    """Near the truth by the error of a half float, without loss the same."""
    if compress == "zstd":
        pytest.importorskip("zstandard")
    method, model, data = direct.small("fedavg")
    agreement = direct.agreement(method, model, data, compress=compress)
    remote = Remote(
        agreement, direct.census(data), direct.Direct(direct.devices(agreement, data, tmp_path)), direct.TIMEOUTS
    )
    server, _ = federate(remote, Settings(rounds=1, seed=7))
    expected, _ = toy.looped(method, model, data, rounds=1, join_ratio=1.0)
    gap = toy.distance({n: t for n, t in expected.items() if n.startswith("server")}, tree.flatten({"server": server}))
    assert gap == 0 if compress == "zstd" else 0 < gap < 0.02


def test_a_flood_does_not_move_the_deadline(tmp_path: Path, clock: Clock) -> None:
    """One client never answers, while an attacker floods the server under its name."""
    remote = federation("fedavg", tmp_path, {(0, 2): "request lost"})
    transport: Any = remote.transport
    receive, count = transport.receive, [0]

    def flooded(seconds: float) -> Event | None:
        clock.now += 0.5
        count[0] += 1
        return receive(seconds) if transport.events else AnswerReceived(2, b"nonsense")

    transport.receive = flooded
    _, history = federate(remote, Settings(rounds=1, seed=7, full_last_round=False))
    assert history[0].left_out == (2,)
    assert count[0] < 1000


def test_a_client_that_loses_its_state_starts_over_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients 0 and 3 lose what they remembered while they are not asked to train."""
    remote = federation("fedper", tmp_path, {})
    transport: Any = remote.transport

    def watch(record: Any) -> None:
        if record.number == 4:
            transport.restart(0, lost=True)

    federate(remote, SETTINGS, watch)
    downs = send(remote.method, remote.method.server_init(remote.model, remote.census), remote.everyone)
    for _ in range(2):
        remote.scored = ((), {})
        assert len(remote.score(remote.everyone, downs, "test").clients) == 5
    assert caplog.text.count("client 0 starts over") == 1


# Too few, and on from the checkpoint.


def test_too_few_answers_stop_the_run_and_it_resumes(tmp_path: Path) -> None:
    lost = {(2, client): "answer lost" for client in (0, 1, 3, 4)}
    remote = federation("scaffold", tmp_path / "devices", lost)
    with pytest.raises(CoterieError, match=r"round 3: 4 of 5 clients did not answer.*checkpoint of round 2 is kept"):
        driven(remote, tmp_path / "out", resume=False)
    again = Remote(remote.agreement, remote.census, remote.transport, TIMEOUTS)
    result = driven(again, tmp_path / "out", resume=True)
    expected, clients = simulation("scaffold", set())
    assert_same(again, result.server, expected, clients)
    assert len(result.history) == 4


def test_a_missing_device_times_out(tmp_path: Path) -> None:
    remote = federation("fedavg", tmp_path, {})
    transport: Any = remote.transport
    transport.absent = {1}
    with pytest.raises(
        CoterieError,
        match=r"\(--wait\): 4 of 5 clients are ready, 5 are needed; missing: client 1, its device is not connected",
    ):
        federate(remote, SETTINGS)


def test_a_resumed_server_needs_as_many_clients_as_a_running_one(tmp_path: Path) -> None:
    """Three of five, by --max-left-out; and waits no longer than --wait for them."""
    remote = federation("fedavg", tmp_path, {})
    welcome = remote.method.server_welcome(remote.method.server_init(remote.model, remote.census))
    transport: Any = remote.transport
    for absent, enough in ({1, 3}, True), ({0, 1, 3}, False):
        again = Remote(remote.agreement, remote.census, transport, TIMEOUTS, 0.5, resumed=True)
        transport.absent = absent
        if enough:
            again.join(welcome)
        else:
            with pytest.raises(CoterieError, match=r"\(--wait\): 2 of 5 clients are ready, 3 are needed; missing: "):
                again.join(welcome)


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
        store.save(0, version, state(i))
    again = Store(tmp_path)
    found = [again.load(0, version) for version in versions]
    assert [t is not None for t in found] == [False] * (6 - KEPT) + [True] * KEPT
    assert found[-1] is not None
    toy.assert_same(found[-1], state(5))


def test_a_clock_that_is_set_back_loses_no_memory(tmp_path: Path) -> None:
    """The files of earlier versions have times in the future, also after a version was read again."""
    store = Store(tmp_path)
    versions = [f"{i:064x}"[::-1] for i in range(5)]
    for i, version in enumerate(versions[:3]):
        store.save(0, version, state(i))
    for path in tmp_path.glob("client-0/*"):
        os.utime(path, (4e9, 4e9))
    for i, version in enumerate(versions[3:], 3):
        assert Store(tmp_path).load(0, versions[2]) is not None
        store.save(0, version, state(i))
    again = Store(tmp_path)
    assert [again.load(0, version) is not None for version in versions] == [False, False, True, True, True]
    found = again.load(0, versions[4])
    assert found is not None
    toy.assert_same(found, state(4))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another version"])
def test_a_damaged_file_is_not_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, version, other = Store(tmp_path), "ab" * 32, "ab" * 16 + "cd" * 16
    store.save(0, version, state(1))
    (path,) = tmp_path.glob("client-0/*")
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[-1] ^= 1
    path.write_bytes({"cut": content[:-5], "empty": b""}.get(damage, content))
    assert Store(tmp_path).load(0, other if damage == "another version" else version) is None
    assert damage == "another version" or "checksum" in caplog.text or "cannot be read" in caplog.text


def test_a_full_disk_is_an_error_and_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is left out while the disk is full, then continues from its last state; no partial file remains."""
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
