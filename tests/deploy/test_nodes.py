"""The post over Flower, and nodes with a folder, on a line without Flower.

What a node says here is what a process of it would say that knows nothing but its folder.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.api import run
from coterie.cli import main
from coterie.clients import flower
from coterie.clients.flower import Flower
from coterie.clients.remote import Patience
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.deploy import node
from coterie.deploy.hosted import numbers
from coterie.deploy.node import node_of
from coterie.deploy.options import read_run
from coterie.deploy.server import Service, conduct
from coterie.network.flower import Line, Parcel, trouble
from coterie.network.wire import Refused
from coterie.personal.run import load_run
from coterie.protection.keys import make_keys
from tests import toy

SETTINGS: dict[str, Any] = {"rounds": 3, "join_ratio": 0.6, "epochs": 1, "seed": 3, "full_last_round": False}


class Fake(Line):
    """Nodes answer when somebody looks for answers; a new process does, whatever was before."""

    def __init__(self, folder: Path, hosted: tuple[str, ...] = ("0,3", "1", "2,4")) -> None:
        self.config: dict[int, Mapping[str, Any]] = {
            10 + n: {"clients": clients, "dir": str(folder / f"device-{n}")} for n, clients in enumerate(hosted)
        }
        self.came = dict.fromkeys(self.config, "noon")
        self.waiting: dict[str, tuple[int, str, Parcel]] = {}
        self.log: list[tuple[int, str]] = []  # all messages: to whom, and of which kind

    def nodes(self) -> dict[int, str]:
        return dict(self.came)

    def push(self, node: int, kind: str, parcel: Parcel, seconds: float, group: str = "") -> str | None:
        if node not in self.came:
            return None
        self.log.append((node, kind))
        self.waiting[str(len(self.log))] = node, kind, parcel
        return str(len(self.log))

    def pull(self, names: Any) -> list[tuple[str, Parcel]]:
        found = []
        for name in [name for name in names if name in self.waiting]:
            node, kind, parcel = self.waiting.pop(name)
            if node in self.came and (answer := self.answer(node, kind, parcel)) is not None:
                found.append((name, answer))
        return found

    def answer(self, node: int, kind: str, parcel: Parcel) -> Parcel | None:
        try:
            return node_of(self.config[node]).answer(kind, parcel)
        except (CoterieError, Refused) as error:
            return trouble(str(error))


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PAUSE", 0.01), ("LOOK", 0.0), ("AGAIN", 0.05)):
        monkeypatch.setattr(flower, name, seconds)
    monkeypatch.setattr(
        node, "load_hosted", lambda clients, wanted: (numbers(clients), toy.toy().pick(numbers(clients)))
    )


def patience(deadline: float = 30, grace: float = 5, wait: float = 30) -> Patience:
    return Patience(deadline, grace, wait)


def federate(line: Line, method: str = "fedpac", **more: Any) -> Any:
    given = {**SETTINGS, "patience": patience(), **more}
    return conduct(method, Service(num_clients=5), lambda greet: Flower(line, greet), model="mlp", **given)


def here(method: str = "fedpac") -> Any:
    return run(method, "mlp", toy.toy(), where="looped", **SETTINGS)


def same(a: Any, b: Any) -> None:
    toy.assert_same(tree.flatten({"server": a.server}), tree.flatten({"server": b.server}))


def test_the_same_as_in_one_process(tmp_path: Path) -> None:
    line = Fake(tmp_path)
    same(federate(line), here())
    kinds = [kind for _, kind in line.log]
    assert kinds.count("hello") == 6  # who are you, and the terms
    assert kinds.count("over") == 3
    # Two clients on one node are asked in one message: join, then in each round training and measurement.
    assert sum(node == 10 and kind == "letters" for node, kind in line.log) <= 1 + 3 * 2


def test_devices_leave_models_that_were_measured(tmp_path: Path) -> None:
    result = federate(Fake(tmp_path))
    left = load_run(next((tmp_path / "device-0").glob("*/run")))
    expected = dict(enumerate(result.history[-1].scores["pre", "test"].accuracy.tolist()))
    assert {client.number: client.accuracy for client in left.clients} == {0: expected[0], 3: expected[3]}


def test_a_node_that_starts_anew_with_the_letter_in_its_hands(tmp_path: Path) -> None:
    """It never answers that letter. When it is back it gets it again, and goes on from its folder."""

    class Restarting(Fake):
        restarts = 0

        def answer(self, node: int, kind: str, parcel: Parcel) -> Parcel | None:
            if kind == "letters" and node == 10 and self.restarts < 4 and len(self.log) % 2:
                self.restarts += 1
                self.came[node] = f"{self.restarts} o'clock"
                return None
            return super().answer(node, kind, parcel)

    line = Restarting(tmp_path)
    same(federate(line), here())
    assert line.restarts > 1


def test_a_node_that_never_answers_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Fake):
        def answer(self, node: int, kind: str, parcel: Parcel) -> Parcel | None:
            asked = sum(n == node and k == "letters" for n, k in self.log)
            return None if node == 12 and asked > 1 else super().answer(node, kind, parcel)

    result = federate(Silent(tmp_path), "fedavg", patience=patience(3), join_ratio=1.0, rounds=2)
    assert [record.left_out for record in result.history[:2]] == [(2, 4), (2, 4)]
    assert "round 1: client 4 did not train: no answer in 3 s" in caplog.text
    assert "round 2: client 4 did not train: its device is not there" in caplog.text


def test_a_node_that_lost_its_folder_gets_the_terms_again(tmp_path: Path) -> None:
    import shutil

    class Wiped(Fake):
        wiped = False

        def answer(self, node: int, kind: str, parcel: Parcel) -> Parcel | None:
            if kind == "letters" and node == 11 and not self.wiped:
                self.wiped = True
                shutil.rmtree(tmp_path / "device-1")
            return super().answer(node, kind, parcel)

    same(federate(Wiped(tmp_path)), here())


def test_nobody_speaks_for_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Liar(Fake):
        def answer(self, node: int, kind: str, parcel: Parcel) -> Parcel | None:
            answer = super().answer(node, kind, parcel)
            if node == 11 and kind == "letters" and answer is not None:
                return answer._replace(words={"clients": "0"})
            return answer

    federate(Liar(tmp_path), patience=patience(2, 0.5), rounds=1)
    assert "clients-1 cannot take part: it answers for clients that are not its own" in caplog.text


def test_what_is_wrong_with_a_node_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = Fake(tmp_path)
    line.config[11] = {**line.config[11], "datset": "mnist"}
    line.config[12] = {**line.config[12], "clients": "3-4"}
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(CoterieError, match="nobody came with the clients 1, 2, 4 in 3 s"),
    ):
        federate(line, patience=patience(wait=3))
    assert caplog.text.count("unknown key node config: 'datset': did you mean 'dataset'?") == 1
    assert caplog.text.count("client 3 is on the device clients-0.3 already") == 1


def test_a_second_node_of_the_same_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = Fake(tmp_path, ("0-4", "0-4"))
    federate(line, "fedavg", rounds=1)
    assert "another node speaks for 'clients-0-4' already" in caplog.text


def test_a_run_goes_on(tmp_path: Path) -> None:
    class Power(Fake):
        def answer(self, node: int, kind: str, parcel: Parcel) -> Parcel | None:
            if sum(kind == "letters" for _, kind in self.log) > 12:
                raise CoterieError("the lights went out")
            return node_of(self.config[node]).answer(kind, parcel)

    with pytest.raises(CoterieError, match="lights"):
        federate(Power(tmp_path), out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "checkpoint").exists()
    same(federate(Fake(tmp_path), out=tmp_path / "run", resume=True), here())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "run config: method is missing"),
        ({"method": "fedpak"}, "did you mean 'fedpac'?"),
        ({"method": "fedpac"}, "how many clients take part"),
        ({"method": "fedpac", "num-clients": "four"}, "run config: num-clients is 'four': it must be a whole number"),
        ({"method": "fedpac", "num-clients": 4, "lambda": 1.0}, "unknown key run config: 'lambda'"),
        ({"method": "fedpac", "num-clients": 4, "resume": True}, "Name its folder as `out`"),
        ({"method": "fedpac", "num-clients": 4, "lr-steps": "5"}, "it must be ROUND:FACTOR"),
    ],
)
def test_wrong_settings(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        read_run(config)


def test_settings() -> None:
    found = read_run(
        {"method": "FedPAC", "num-clients": 4, "lr": "", "lr-steps": "2:0.5,4:0.1", "align": 2, "model": ""}
    )
    assert found.model is None
    assert found.settings == {"lr_steps": ((2, 0.5), (4, 0.1)), "align": 2.0}


def test_an_app_says_what_was_asked_for(tmp_path: Path) -> None:
    flags = ["--num-clients=4", "--local-epochs=2", "--lr-steps=2:0.5", "--align=0.5", "--no-full-last-round"]
    main(["flower", str(tmp_path / "app"), "FedPAC", *flags])
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    found = read_run(config)
    assert (found.method, found.service.num_clients, found.out) == ("fedpac", 4, None)
    assert found.settings == {"epochs": 2, "lr_steps": ((2, 0.5),), "align": 0.5, "full_last_round": False}
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
    expected = run("fedper", "mlp", toy.toy(), where="looped", **{**SETTINGS, "rounds": 1})
    left = load_run(next((tmp_path / "device-0").glob("*/run")))
    x = toy.toy().test.client(3)[0]
    torch.testing.assert_close(left.personal_model(3)(x), expected.personal_model(3)(x), rtol=0, atol=1e-4)


def test_a_device_with_keys_sends_nothing_that_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_keys(tmp_path / "keys")
    line = Fake(tmp_path)
    with_keys(line, tmp_path / "keys")
    with pytest.raises(CoterieError, match="clients are there"):
        federate(line, patience=patience(wait=0.3))
    assert "the server wants weights that it can read" in caplog.text
    assert not any(kind == "letters" for _, kind in line.log)


def test_a_device_without_keys_is_told_that_it_needs_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_keys(tmp_path / "keys")
    with pytest.raises(CoterieError, match="clients are there"):
        federate(Fake(tmp_path), encrypt="ckks", keys=str(tmp_path / "keys"), patience=patience(wait=0.3))
    assert "give the folder of its keys with --keys" in caplog.text


def test_noise_comes_from_a_secret_of_each_device(tmp_path: Path) -> None:
    """The same seed, settings and data; other secrets, so other noise. With these secrets again, the same."""
    asked = {"dp_statistics": 1.0, "rounds": 1}
    one, other = (federate(Fake(tmp_path / name), **asked) for name in ("one", "other"))
    again = federate(Fake(tmp_path / "one"), **asked)
    same(one, again)
    assert toy.distance({"": one.server.prototypes}, {"": other.server.prototypes}) > 1e-3
    found = [path.read_text() for path in tmp_path.rglob("secret")]
    assert len(set(found)) == 6
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("secret")} == {0o600}
    assert one.privacy["epsilon"] == pytest.approx(
        run("fedpac", "mlp", toy.toy(), where="looped", **{**SETTINGS, **asked}).privacy["epsilon"]
    )


def test_classes_are_told_only_if_the_user_says_so(tmp_path: Path) -> None:
    federate(Fake(tmp_path), rounds=1, out=tmp_path / "silent")
    assert not (tmp_path / "silent" / "classes.csv").exists()
    main(["report", str(tmp_path / "silent"), "--out", str(tmp_path / "report.html")])
    assert "FedPAC" in (tmp_path / "report.html").read_text()
    with pytest.raises(CoterieError, match="the models are on its devices"):
        load_run(tmp_path / "silent")
    line = Fake(tmp_path / "open")
    line.config = {node: {**config, "tell-classes": True} for node, config in line.config.items()}
    federate(line, rounds=1, out=tmp_path / "told")
    _, *rows = (tmp_path / "told" / "classes.csv").read_text().splitlines()
    counts = toy.toy().train.class_counts(toy.CLASSES).tolist()
    assert rows == [",".join(map(str, [client, *own])) for client, own in enumerate(counts)]
