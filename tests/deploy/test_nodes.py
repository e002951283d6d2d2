"""The Flower transport and its devices, with a fake connection instead of Flower.

Every reply comes from a new device object, as from a new process that has only its folder.
"""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.api import run
from coterie.api.saved_run import load_run
from coterie.cli import main
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.deploy.device_data import load_hosted_clients, numbers
from coterie.deploy.pending import Timeouts
from coterie.deploy.server import Service, run_federation
from coterie.deploy.transports.flower import device as flower_device
from coterie.deploy.transports.flower import server as flower_server
from coterie.deploy.transports.flower.connection import FlowerConnection, Packet, error_packet
from coterie.deploy.transports.flower.device import device_from_config
from coterie.deploy.transports.flower.options import read_run_config
from coterie.deploy.transports.flower.server import FlowerTransport
from coterie.deploy.wire import Refused
from coterie.privacy.keys import make_keys
from tests import toy

SETTINGS: dict[str, Any] = {"rounds": 3, "join_ratio": 0.6, "local_epochs": 1, "seed": 3, "full_last_round": False}


class Fake(FlowerConnection):
    """Nodes answer when replies are polled, each time as a new process."""

    def __init__(self, folder: Path, hosted: tuple[str, ...] = ("0,3", "1", "2,4")) -> None:
        self.config: dict[int, Mapping[str, Any]] = {
            10 + n: {"clients": clients, "dir": str(folder / f"device-{n}")} for n, clients in enumerate(hosted)
        }
        self.came = dict.fromkeys(self.config, "noon")
        self.waiting: dict[str, tuple[int, str, Packet]] = {}
        self.log: list[tuple[int, str]] = []  # all messages: to whom, and of which kind

    def nodes(self) -> dict[int, str]:
        return dict(self.came)

    def push(self, node: int, kind: str, packet: Packet, seconds: float, group: str = "") -> str | None:
        if node not in self.came:
            return None
        self.log.append((node, kind))
        self.waiting[str(len(self.log))] = node, kind, packet
        return str(len(self.log))

    def pull(self, names: Any) -> list[tuple[str, Packet]]:
        found = []
        for name in [name for name in names if name in self.waiting]:
            node, kind, packet = self.waiting.pop(name)
            if node in self.came and (answer := self.answer(node, kind, packet)) is not None:
                found.append((name, answer))
        return found

    def answer(self, node: int, kind: str, packet: Packet) -> Packet | None:
        try:
            return device_from_config(self.config[node]).answer(kind, packet)
        except (CoterieError, Refused) as error:
            return error_packet(str(error))


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PAUSE", 0.01), ("LOOK", 0.0), ("RETRY", 0.05)):
        monkeypatch.setattr(flower_server, name, seconds)
    monkeypatch.setattr(
        flower_device,
        "load_hosted_clients",
        lambda clients, wanted: (numbers(clients), toy.toy().pick(numbers(clients))),
    )


def timeouts(deadline: float = 30, grace: float = 5, wait: float = 30) -> Timeouts:
    return Timeouts(deadline, grace, wait)


def federate(line: FlowerConnection, method: str = "fedpac", **more: Any) -> Any:
    given = {**SETTINGS, "timeouts": timeouts(), **more}
    return run_federation(
        method, Service(num_clients=5), lambda register: FlowerTransport(line, register), model="mlp", **given
    )


def here(method: str = "fedpac") -> Any:
    return run(method, toy.toy(), "mlp", backend=toy.IN_TURN, **SETTINGS)


def same(a: Any, b: Any) -> None:
    toy.assert_same(tree.flatten({"server": a.server}), tree.flatten({"server": b.server}))


def test_the_same_as_in_one_process(tmp_path: Path) -> None:
    line = Fake(tmp_path)
    same(federate(line), here())
    kinds = [kind for _, kind in line.log]
    assert kinds.count("hello") == 6  # who are you, and the terms
    assert kinds.count("over") == 3
    # Two clients on one node are asked in one message: join, then in each round training and measurement.
    assert sum(node == 10 and kind == "requests" for node, kind in line.log) <= 1 + 3 * 2


def test_devices_leave_models_that_were_measured(tmp_path: Path) -> None:
    result = federate(Fake(tmp_path))
    left = load_run(next((tmp_path / "device-0").glob("*/run")))
    expected = dict(enumerate(result.history[-1].scores["pre", "test"].value.tolist()))
    assert {client.number: client.score for client in left.members} == {0: expected[0], 3: expected[3]}


def test_a_node_that_restarts_while_it_processes_a_request(tmp_path: Path) -> None:
    """It never answers that request. After reconnecting it gets the request again, and continues from its folder."""

    class Restarting(Fake):
        restarts = 0

        def answer(self, node: int, kind: str, packet: Packet) -> Packet | None:
            if kind == "requests" and node == 10 and self.restarts < 4 and len(self.log) % 2:
                self.restarts += 1
                self.came[node] = f"{self.restarts} o'clock"
                return None
            return super().answer(node, kind, packet)

    line = Restarting(tmp_path)
    same(federate(line), here())
    assert line.restarts > 1


def test_a_node_that_never_answers_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Fake):
        def answer(self, node: int, kind: str, packet: Packet) -> Packet | None:
            asked = sum(n == node and k == "requests" for n, k in self.log)
            return None if node == 12 and asked > 1 else super().answer(node, kind, packet)

    result = federate(Silent(tmp_path), "fedavg", timeouts=timeouts(3), join_ratio=1.0, rounds=2)
    assert [record.left_out for record in result.history[:2]] == [(2, 4), (2, 4)]
    assert "round 1: client 4 did not train: no answer within 3 s" in caplog.text
    assert "round 2: client 4 did not train: its device is not connected" in caplog.text


def test_a_node_that_lost_its_folder_gets_the_terms_again(tmp_path: Path) -> None:
    import shutil

    class Wiped(Fake):
        wiped = False

        def answer(self, node: int, kind: str, packet: Packet) -> Packet | None:
            if kind == "requests" and node == 11 and not self.wiped:
                self.wiped = True
                shutil.rmtree(tmp_path / "device-1")
            return super().answer(node, kind, packet)

    same(federate(Wiped(tmp_path)), here())


def test_a_node_cannot_answer_for_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Liar(Fake):
        def answer(self, node: int, kind: str, packet: Packet) -> Packet | None:
            answer = super().answer(node, kind, packet)
            if node == 11 and kind == "requests" and answer is not None:
                return answer._replace(words={"clients": "0"})
            return answer

    federate(Liar(tmp_path), timeouts=timeouts(2, 0.5), rounds=1)
    assert "clients-1 cannot take part: answers for clients of another node" in caplog.text


def test_an_error_of_a_node_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = Fake(tmp_path)
    line.config[11] = {**line.config[11], "datset": "mnist"}
    line.config[12] = {**line.config[12], "clients": "3-4"}
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(CoterieError, match="timed out waiting for clients 1, 2, 4 after 3 s"),
    ):
        federate(line, timeouts=timeouts(wait=3))
    assert caplog.text.count("unknown key in node config 'datset': did you mean 'dataset'?") == 1
    assert caplog.text.count("cannot take part: client 3 is already hosted by device clients-0.3") == 1
    assert caplog.text.count("the server refused this node: client 3 is already hosted by device clients-0.3") == 1


def test_a_node_with_columns_in_another_order_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_device, "load_hosted_clients", load_hosted_clients)
    line = Fake(tmp_path, ("0", "1"))
    for number, header in enumerate(("age,chol,label", "chol,age,label")):
        path = tmp_path / f"ward-{number}.csv"
        path.write_text("\n".join([header, *(f"{i},{-i},{i % 2}" for i in range(20))]), encoding="utf-8")
        line.config[10 + number] = {**line.config[10 + number], "dataset": str(path)}
    given = {**SETTINGS, "timeouts": timeouts(wait=2)}
    with caplog.at_level(logging.INFO), pytest.raises(CoterieError, match="timed out waiting for clients 1"):
        run_federation(
            "fedavg", Service(num_clients=2), lambda register: FlowerTransport(line, register), model="mlp", **given
        )
    told = "device clients-1 has column 'chol' at position 1, device clients-0 has column 'age'"
    assert told in caplog.text


def test_a_second_node_of_the_same_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = Fake(tmp_path, ("0-4", "0-4"))
    federate(line, "fedavg", rounds=1)
    assert "another node is already connected as 'clients-0-4'" in caplog.text


def test_a_run_resumes(tmp_path: Path) -> None:
    class Power(Fake):
        def answer(self, node: int, kind: str, packet: Packet) -> Packet | None:
            if sum(kind == "requests" for _, kind in self.log) > 12:
                raise CoterieError("the lights went out")
            return device_from_config(self.config[node]).answer(kind, packet)

    with pytest.raises(CoterieError, match="lights"):
        federate(Power(tmp_path), out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "checkpoint").exists()
    same(federate(Fake(tmp_path), out=tmp_path / "run", resume=True), here())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "run config: method is missing"),
        ({"method": "fedpak"}, "did you mean 'fedpac'?"),
        ({"method": "fedpac"}, "--num-clients is required"),
        ({"method": "fedpac", "num-clients": "four"}, "run config: num-clients is 'four': it must be a whole number"),
        ({"method": "fedpac", "num-clients": 4, "lambda": 1.0}, "unknown key in run config 'lambda'"),
        ({"method": "fedpac", "num-clients": 4, "resume": True}, "`resume` needs `out`"),
        ({"method": "fedpac", "num-clients": 4, "schedule": 5}, "schedule is 5: it must be text"),
    ],
)
def test_wrong_settings(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        read_run_config(config)


def test_settings() -> None:
    found = read_run_config(
        {"method": "FedPAC", "num-clients": 4, "lr": "", "schedule": "steps:2=0.5:4=0.1", "align": 2, "model": ""}
    )
    assert found.model is None
    assert found.settings == {"schedule": "steps:2=0.5:4=0.1", "align": 2.0}


def test_an_app_says_what_was_asked_for(tmp_path: Path) -> None:
    flags = ["--num-clients=4", "--local-epochs=2", "--schedule=steps:2=0.5", "--align=0.5", "--no-full-last-round"]
    main(["flower", str(tmp_path / "app"), "FedPAC", *flags])
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    found = read_run_config(config)
    assert (found.method, found.service.num_clients, found.out) == ("fedpac", 4, None)
    assert found.settings == {"local_epochs": 2, "schedule": "steps:2=0.5", "align": 0.5, "full_last_round": False}
    assert {"rounds", "join-ratio", "seed", "lr", "head-epochs", "deadline", "out", "resume"} <= config.keys()


@pytest.mark.parametrize("flags", [["--num-clients=0"], ["--num-clients=4", "--deadline=0"]])
def test_no_app_of_wrong_settings(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["flower", str(tmp_path / "app"), "fedpac", *flags])
    assert not (tmp_path / "app").exists()


def with_keys(line: Fake, folder: Path) -> None:
    line.config = {node: {**config, "keys": str(folder)} for node, config in line.config.items()}


def test_weights_that_the_server_cannot_read(tmp_path: Path) -> None:
    """It has the public key only; what it comes to is what it would be without encryption."""
    make_keys(tmp_path / "keys")
    (tmp_path / "public").mkdir()
    (tmp_path / "keys" / "public.ckks").rename(tmp_path / "public" / "public.ckks")
    line, asked = Fake(tmp_path), {"encrypt": "ckks", "keys": str(tmp_path / "public"), "rounds": 1}
    with_keys(line, tmp_path / "keys")
    federate(line, "fedper", **asked)
    expected = run("fedper", toy.toy(), "mlp", backend=toy.IN_TURN, **{**SETTINGS, "rounds": 1})
    left = load_run(next((tmp_path / "device-0").glob("*/run")))
    x = toy.toy().test.client(3)[0]
    torch.testing.assert_close(left.personal_model(3)(x), expected.personal_model(3)(x), rtol=0, atol=1e-4)


def test_a_device_with_keys_sends_nothing_that_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_keys(tmp_path / "keys")
    line = Fake(tmp_path)
    with_keys(line, tmp_path / "keys")
    with pytest.raises(CoterieError, match="clients are ready"):
        federate(line, timeouts=timeouts(wait=0.3))
    assert "the server requests unencrypted weights" in caplog.text
    assert not any(kind == "requests" for _, kind in line.log)


def test_a_device_without_keys_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_keys(tmp_path / "keys")
    with pytest.raises(CoterieError, match="clients are ready"):
        federate(Fake(tmp_path), encrypt="ckks", keys=str(tmp_path / "keys"), timeouts=timeouts(wait=0.3))
    assert "pass the folder of its keys with --keys" in caplog.text


def test_noise_is_new_in_every_run(tmp_path: Path) -> None:
    """The same seed, settings, data and folders, and other noise; no secret lies on the disk that it follows from."""
    asked = {"dp_statistics": 1.0, "rounds": 1}
    one, again = (federate(Fake(tmp_path), **asked) for _ in range(2))
    assert toy.distance({"": one.server.prototypes}, {"": again.server.prototypes}) > 1e-3
    assert not list(tmp_path.rglob("secret"))
    assert one.privacy["epsilon"] == pytest.approx(
        run("fedpac", toy.toy(), "mlp", backend=toy.IN_TURN, **{**SETTINGS, **asked}).privacy["epsilon"]
    )
    spent = json.loads((tmp_path / "device-1" / "privacy" / "client-1.json").read_text())["answers"]
    assert len(spent) == 2  # of both runs


def test_a_federation_under_dp_sample_runs_and_tells_no_scores(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"method": "fedavg", "dp": "sample", "dp_noise": 1.0, "rounds": 2}
    result = federate(Fake(tmp_path / "silent"), **asked)
    assert all(math.isnan(record.score("pre")) for record in result.history if record.score("pre") is not None)
    line = Fake(tmp_path / "open")
    line.config = {node: {**config, "tell-scores": True} for node, config in line.config.items()}
    told = federate(line, **asked)
    assert told.history[-1].score("finished") > 0
    left = load_run(next((tmp_path / "silent" / "device-0").glob("*/run")))
    assert all(0 <= client.score <= 1 for client in left.members)  # at home, its models are measured


@pytest.mark.parametrize(
    ("setting", "reason"),
    [({"normalise": "auto"}, "use --normalise none"), ({"tell-classes": True}, "omit it")],
)
def test_exact_figures_of_samples_do_not_go_with_dp_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: dict[str, Any], reason: str
) -> None:
    line = Fake(tmp_path)
    line.config = {node: {**config, **setting} for node, config in line.config.items()}
    with pytest.raises(CoterieError, match="clients are ready"):
        federate(line, "fedavg", dp="sample", rounds=1, timeouts=timeouts(wait=0.3))
    assert reason in caplog.text
    assert not any(kind == "requests" for _, kind in line.log)


def test_a_device_with_a_budget_joins_only_where_devices_add_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = Fake(tmp_path)
    line.config = {node: {**config, "max-epsilon": 3.0} for node, config in line.config.items()}
    for asked in ({}, {"dp": "client"}):
        with pytest.raises(CoterieError, match="clients are ready"):
            federate(line, "fedavg", rounds=1, timeouts=timeouts(wait=0.3), **asked)
        assert "--max-epsilon needs a federation in which devices add noise" in caplog.text
        caplog.clear()
    with pytest.raises(CoterieError, match="cannot be combined with --max-epsilon"):
        device_from_config({**line.config[10], "normalise": "auto"}).answer("hello", Packet({}))


def test_a_server_that_would_repeat_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="remove --checkpoint-every 3"):
        federate(Fake(tmp_path), "fedavg", dp="sample", checkpoint_every=3)


def test_class_counts_are_sent_only_with_tell_classes(tmp_path: Path) -> None:
    federate(Fake(tmp_path), rounds=1, out=tmp_path / "silent")
    assert not (tmp_path / "silent" / "classes.csv").exists()
    main(["report", str(tmp_path / "silent"), "--out", str(tmp_path / "report.html")])
    assert "FedPAC" in (tmp_path / "report.html").read_text()
    with pytest.raises(CoterieError, match="its devices have the models"):
        load_run(tmp_path / "silent")
    line = Fake(tmp_path / "open")
    line.config = {node: {**config, "tell-classes": True} for node, config in line.config.items()}
    federate(line, rounds=1, out=tmp_path / "told")
    _, *rows = (tmp_path / "told" / "classes.csv").read_text().splitlines()
    counts = toy.toy().train.class_counts(toy.CLASSES).tolist()
    assert rows == [",".join(map(str, [client, *own])) for client, own in enumerate(counts)]
