"""A device that adds noise answers one question of a round, whatever happens to it, and counts what left it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.deploy.agreement import Agreement
from coterie.deploy.device import FAILED, Device
from coterie.deploy.messages import Message, Received
from coterie.deploy.privacy_record import PrivacyBudget, PrivacyRecord
from coterie.deploy.remote import Remote
from coterie.deploy.store import Store
from coterie.deploy.wire import Header
from coterie.execution import Looped
from coterie.federation import Settings, federate
from coterie.privacy import Protection
from coterie.privacy.accountant import Spent, epsilon
from coterie.privacy.noise import SecretNoise
from coterie.runs import disk
from tests import direct, toy
from tests.privacy.test_noise import Quiet

SAMPLE = Protection(dp="sample", dp_noise=2.0, dp_clip=0.5)
ROUNDS = 4


class Lab:
    """A device with client 0, and a server that can ask it anything."""

    def __init__(self, folder: Path, protection: Protection = SAMPLE, name: str = "fedavg", **budget: Any) -> None:
        self.folder, self.protection, self.budget = folder, protection, PrivacyBudget(protection, ROUNDS, **budget)
        self.data, model = toy.toy().pick([0]), toy.model(torch.float32)
        self.agreement = direct.agreement(protection.deployed(toy.method(name), model, 3), model, toy.toy())
        self.device = self.restart()
        self.base = self.ask(self.joining)[0].header.made

    def restart(self) -> Device:
        """The device as a new process finds it on its disk."""
        place, federation = Store(self.folder / direct.FEDERATION[:16]), direct.FEDERATION
        self.device = Device(
            self.agreement, self.data, (0,), place, PrivacyRecord(self.folder, federation, self.budget)
        )
        return self.device

    @property
    def joining(self) -> Message:
        return self.agreement.request(Header("join", client=0, base=""), tree.flatten(self.agreement.templates.welcome))

    def train_request(self, round: int, shift: float = 0.0, kind: str = "train") -> Message:
        """To train from the first weights, plus a shift."""
        down = tree.apply(lambda t: t + shift if t.is_floating_point() else t, self.agreement.templates.down)
        shared = self.agreement.shared_message(down)
        header = Header(kind, client=0, round=round, rate=1.0, base=self.base)
        return self.agreement.request(header, tree.flatten(down), shared)

    def ask(self, request: Message) -> tuple[Received, bytes]:
        answer, failed = self.device.answer(request.own, request.shared)
        said = self.agreement.open_answer(answer, request.header)
        assert failed == (said.header.kind == "error")
        return said, answer


def weights(said: Received) -> Tensor:
    return torch.cat([t.flatten() for name, t in said.tensors.items() if name.startswith("up.weights")])


def test_a_question_that_comes_again_gets_the_same_bytes_also_after_a_restart(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    first = lab.ask(lab.train_request(0))[1]
    assert lab.ask(lab.train_request(0))[1] == first
    lab.restart()
    assert lab.ask(lab.train_request(0))[1] == first
    assert lab.device.record is not None
    assert lab.device.record.spent(0)[0] == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_two_questions_of_one_round_get_one_answer(tmp_path: Path, restarted: bool) -> None:
    """The attack: another model in the same round, and the difference of the answers. There is no second answer."""
    lab = Lab(tmp_path)
    assert lab.ask(lab.train_request(0))[0].header.kind == "train"
    for shift in (1e-3, -1e-3, 1.0):
        if restarted:
            lab.restart()
        said, _ = lab.ask(lab.train_request(0, shift))
        assert said.header.kind == "error"
        assert "it already answered another request in round 1" in said.header.note
        assert not said.tensors


def test_the_difference_of_two_rounds_is_noisier_than_one(tmp_path: Path) -> None:
    """Asked the same in two rounds, noise does not cancel: it has √2 times the deviation of one answer.

    A step's noise is lr z C / 8 and stays in the momentum of 0.5: after four steps, these weigh 1.875, 1.75, 1.5, 1.
    """
    lab = Lab(tmp_path)
    first, second = (weights(lab.ask(lab.train_request(round))[0]) for round in range(2))
    single = 0.05 * 2.0 * 0.5 / 8 * math.sqrt(1.875**2 + 1.75**2 + 1.5**2 + 1)
    assert float((second - first).std()) > 1.2 * single


def test_answers_that_were_lost_are_counted(tmp_path: Path) -> None:
    """What counts is what was answered, not what arrived: 13 samples, batches of 8, 2 epochs."""
    lab = Lab(tmp_path)

    requests = [lab.train_request(round) for round in range(3)]
    for request in requests:
        lab.device.answer(request.own, request.shared)  # nobody receives it
    lab.restart()
    record = lab.device.record
    assert record is not None
    answers, spent = record.spent(0)
    assert answers == 3
    assert spent == pytest.approx(epsilon([Spent(3 * 2 * 2, 2.0, 8 / 13)], 1e-5), rel=1e-6)
    assert "client 0: ε = " in record.summary([0])


def test_a_device_stops_when_its_budget_is_spent(tmp_path: Path) -> None:
    two = epsilon([Spent(2 * 2 * 2, 2.0, 8 / 13)], 1e-5)
    lab = Lab(tmp_path, max_epsilon=1.01 * two)
    assert [lab.ask(lab.train_request(round))[0].header.kind for round in range(3)] == ["train", "train", "error"]
    lab.restart()
    said, _ = lab.ask(lab.train_request(3))
    assert "privacy budget exhausted" in said.header.note
    assert "--max-epsilon is" in said.header.note
    assert lab.ask(lab.train_request(1))[0].header.kind == "train"  # what it has answered, it can send again


def test_the_budget_is_one_for_all_federations(tmp_path: Path) -> None:
    """A server cannot get more by calling itself a new federation."""
    lab = Lab(tmp_path, max_epsilon=1.01 * epsilon([Spent(2 * 2, 2.0, 8 / 13)], 1e-5))
    assert lab.ask(lab.train_request(0))[0].header.kind == "train"
    other = PrivacyRecord(tmp_path, "cd" * 16, lab.budget)
    lab.device.record = other
    said, _ = lab.ask(lab.train_request(1))
    assert "budget exhausted" in said.header.note


def test_without_a_budget_of_its_own_it_answers_the_agreed_rounds_only(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for round in (ROUNDS + 1, 10**6):
        assert "beyond the agreed 4 rounds" in lab.ask(lab.train_request(round))[0].header.note
    assert lab.ask(lab.train_request(ROUNDS))[0].header.kind == "train"  # all train once more after the last round


def test_a_training_that_fails_counts_and_quotes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path)
    monkeypatch.setattr(
        lab.device.runner, "work", lambda *about: (_ for _ in ()).throw(ValueError("sample 3 is 0.123"))
    )
    said, _ = lab.ask(lab.train_request(0))
    assert said.header.note == FAILED
    monkeypatch.undo()
    lab.restart()
    assert lab.ask(lab.train_request(0))[0].header.note == FAILED  # the same answer, not another draw
    assert lab.device.record is not None
    assert lab.device.record.spent(0)[0] == 1


def test_a_damaged_record_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.ask(lab.train_request(0))
    path = tmp_path / "privacy" / "client-0.json"
    told = json.loads(path.read_text())
    told["answers"] = []
    path.write_text(json.dumps(told))
    lab.restart()
    for request in (lab.train_request(0), lab.train_request(1)):
        assert lab.ask(request)[0].header.note == "its record of earlier answers is damaged"


class Killed(BaseException):
    """As by SIGKILL: nothing is cleaned up."""


def test_killed_at_any_write_no_second_draw_of_a_round_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before and after every fsync of an answer: what comes later is that answer, or the only one."""
    real, points = disk.sync, 0
    while True:
        lab, count = Lab(tmp_path / str(points)), 0

        def sync(path: Path, last: int = points) -> None:
            nonlocal count
            if count == last:
                raise Killed
            count += 1
            real(path)

        monkeypatch.setattr(disk, "sync", sync)
        left: bytes | None = None
        with contextlib.suppress(Killed):
            left = lab.ask(lab.train_request(0))[1]
        monkeypatch.setattr(disk, "sync", real)
        lab.restart()
        recorded = (lab.folder / "privacy" / "client-0.json").exists()
        assert recorded or left is None  # written before it leaves
        said, _ = lab.ask(lab.train_request(0, 1e-3))
        assert (said.header.kind == "error") == recorded
        if left is not None:
            assert lab.ask(lab.train_request(0))[1] == left
            break
        points += 1
    assert points >= 6


def test_the_record_is_on_the_disk_before_the_answer_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power forgets what was written and not synced: the record, then the name of its file."""
    lab, real, synced = Lab(tmp_path), disk.sync, list[Path]()
    monkeypatch.setattr(disk, "sync", lambda path: (real(path), synced.append(path)))
    lab.ask(lab.train_request(0))
    record = tmp_path / "privacy" / "client-0.json.part"
    assert tmp_path / "privacy" in synced[synced.index(record) :]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_any_moment_no_second_draw_of_a_round_leaves(tmp_path: Path) -> None:
    """A process that answers is killed after 0 to 60 ms; whatever left it is all that ever leaves."""
    seen = set()
    for attempt in range(12):
        lab = Lab(tmp_path / str(attempt))
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(there, lab.ask(lab.train_request(0))[1][-16:])
            time.sleep(10)
        time.sleep(attempt * 0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(there)
        left = os.read(here, 16)
        os.close(here)
        lab.restart()
        said, _ = lab.ask(lab.train_request(0, 1e-3))
        seen.add((bool(left), said.header.kind))
        if left:
            assert said.header.kind == "error"
            assert lab.ask(lab.train_request(0))[1][-16:] == left
    assert (False, "train") in seen


def test_two_processes_of_a_device_do_not_answer_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower may start several: two questions of one round at the same time, one answer."""
    process = Device._process
    monkeypatch.setattr(Device, "_process", lambda *given: (time.sleep(0.2), process(*given))[1])
    lab = Lab(tmp_path)
    requests, told = [lab.train_request(0), lab.train_request(0, 1e-3)], list[str]()
    devices = [lab.restart() for _ in requests]

    def answer(device: Device, request: Message) -> None:
        said = lab.agreement.open_answer(device.answer(request.own, request.shared)[0], request.header)
        told.append(said.header.note)

    threads = [threading.Thread(target=answer, args=pair) for pair in zip(devices, requests, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told)[0] == ""
    assert "another request" in sorted(told)[1]


def test_statistics_are_counted_too(tmp_path: Path) -> None:
    lab = Lab(tmp_path, Protection(dp_statistics=3.0), "fedpac")
    lab.ask(lab.train_request(0))
    assert "another request" in lab.ask(lab.train_request(0, 1e-3))[0].header.note
    assert lab.device.record is not None
    assert lab.device.record.spent(0)[1] == pytest.approx(epsilon([Spent(1, 3.0)], 1e-5))


def make_agreement(source: SecretNoise) -> Agreement:
    model = toy.model(torch.float32)
    return direct.agreement(SAMPLE.deployed(toy.method("fedavg"), model, 3, source), model, toy.toy())


def federated(agreement: Agreement, folder: Path, tell_scores: bool = True) -> tuple[Any, Any]:
    data, budget = toy.toy(), PrivacyBudget(SAMPLE, 2)
    devices = []
    for n, ids in enumerate(direct.HOSTED):
        record = PrivacyRecord(folder / str(n), agreement.federation, budget)
        devices.append(Device(agreement, data.pick(ids), ids, Store(folder / str(n) / "states"), record, tell_scores))
    clients = Remote(agreement, direct.census(data), direct.Direct(devices), direct.TIMEOUTS)
    return federate(clients, Settings(rounds=2, join_ratio=0.6, seed=7))


def test_devices_compute_what_a_simulation_does_up_to_noise(tmp_path: Path) -> None:
    """Bit for bit, with a generator that only tests have: no noise, and the draws of a simulation."""
    agreement = make_agreement(Quiet())
    server, _ = federated(agreement, tmp_path)
    clients = Looped(agreement.method, agreement.model, toy.toy(), 7, processes=1)
    expected, _ = federate(clients, Settings(rounds=2, join_ratio=0.6, seed=7))
    toy.assert_same(tree.flatten(expected), tree.flatten(server))


def test_scores_stay_on_devices_that_do_not_tell_them(tmp_path: Path) -> None:
    """The server then reports no accuracy, rather than 0."""
    _, told = federated(make_agreement(SecretNoise()), tmp_path / "told")
    _, silent = federated(make_agreement(SecretNoise()), tmp_path / "silent", tell_scores=False)
    for record in silent:
        for scores in record.scores.values():
            assert not any(t.any() for t in (scores.weighted, scores.total, scores.loss))
    assert math.isfinite(told[0].score("pre"))
    assert math.isnan(silent[0].score("pre"))


def test_a_device_that_adds_noise_needs_a_record(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="needs a privacy record"):
        Device(make_agreement(SecretNoise()), toy.toy(), (0, 1, 2, 3, 4), Store(tmp_path))
