"""A federation of devices evaluates the global model: on the devices, or on the server's own test samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.deploy.global_model import completed, tensors_read
from coterie.deploy.handshake import SampleSchema
from coterie.deploy.remote import Remote
from coterie.deploy.server import Service, server_test
from coterie.deploy.server_samples import load_server_test
from coterie.execution.scoring import SERVER
from coterie.federation import History, Settings, federate
from coterie.methods import METHODS
from coterie.methods.feddyn import FedDyn, Server, broadcast
from coterie.personal.labelled import LabelledReading
from coterie.personal.labels import LabelMapping
from coterie.privacy import Protection
from tests import direct, toy

TWO = Settings(rounds=2, join_ratio=0.6, seed=7)
IN_ORDER = LabelledReading(labels=LabelMapping(in_order=True))


def remote(method: AnyMethod, folder: Path, **more: Any) -> Remote:
    _, model, data = direct.small("ditto")
    agreed = direct.agreement(method, model, data)
    line = direct.Direct(direct.devices(agreed, data, folder))
    return Remote(agreed, direct.census(data), line, direct.TIMEOUTS, **more)


def global_scores(history: History) -> list[list[list[float]]]:
    return [toy.rows(record.scores["global", "test"]) for record in history if ("global", "test") in record.scores]


@pytest.mark.parametrize(
    ("name", "fields"),
    [("ditto", {"weights"}), ("fedcac", {"weights"}), ("feddyn", {"mean", "drift"}), ("fedreg", {"encoder", "head"}),
     ("fedbabu", {"encoder"}), ("fedper", set()), ("local", set())],
)  # fmt: skip
def test_what_is_sent_of_the_server_state(name: str, fields: set[str]) -> None:
    method, model, data = toy.method(name), toy.model(torch.float32), toy.toy()
    server = method.server_init(model, direct.census(data))
    read = tensors_read(method, model, server, torch.zeros(2, *toy.SHAPE, dtype=torch.uint8))
    assert {entry.split(".")[0] for entry in read} == fields


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].personal_is_global])
def test_the_rest_of_the_state_does_not_matter(name: str) -> None:
    """Even as NaN."""
    method, model, data = toy.method(name), toy.model(torch.float32), toy.toy()
    server, x = method.server_init(model, direct.census(data)), data.test.x[:3]
    if (read := tensors_read(method, model, server, x)) == frozenset():
        assert method.server_predict(model, server, x) is None
        return
    sent = completed(server, {n: t for n, t in tree.items(server) if n in read})
    expected, found = (method.server_predict(model, state, x) for state in (server, sent))
    assert expected is not None
    assert found is not None
    assert torch.equal(expected, found)


def test_the_same_with_noise_on_the_server(tmp_path: Path) -> None:
    """A protection keeps a state of its own around the method's, of which nothing is sent."""
    method, model, data = direct.small("ditto")
    layered = Protection(robust="median").around(method, model, 3, 7)
    expected = global_scores(toy.looped(layered, model, data, rounds=2)[1])
    assert global_scores(federate(remote(layered, tmp_path), TWO)[1]) == expected
    assert len(expected) == 2


def test_devices_that_do_not_report_scores(tmp_path: Path) -> None:
    clients = remote(toy.method("ditto"), tmp_path)
    transport: Any = clients.transport
    for device in transport.devices.values():
        device.tell_scores = False
    _, history = federate(clients, TWO)
    assert not history[-1].scores["global", "test"].total.any()


@dataclass(frozen=True)
class LateFedDyn(FedDyn):
    """Its global model reads another part of the state after the first round, which a rehearsal cannot see."""

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        first = all(torch.equal(t, model.initial[n]) for n, t in tree.items(server.mean))
        return model(server.mean if first else broadcast(server), x)


def test_a_part_of_the_state_that_is_not_sent_is_never_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clients = remote(LateFedDyn(train=toy.method("feddyn").train), tmp_path)
    _, history = federate(clients, replace(TWO, rounds=1))
    assert not len(history[0].scores["global", "test"].clients)
    assert "client 0 did not evaluate the global model: the loss is not finite" in caplog.text


def test_a_state_of_another_shape_is_not_evaluated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clients = remote(toy.method("ditto"), tmp_path)
    server = clients.method.server_init(clients.model, clients.census)
    assert clients.score_global(tree.apply(lambda t: t[None], server), "test") is None
    assert "the global model is not evaluated: its tensors are not those of the start" in caplog.text


@pytest.mark.parametrize("name", ["ditto", "fedavg", "fedreg"])
def test_on_samples_of_the_server(name: str, tmp_path: Path) -> None:
    """On the test samples of all clients: as many correct as in a simulation, and the same loss."""
    method, model, data = direct.small(name)
    np.savez(tmp_path / "test.npz", x=data.test.x.numpy(), y=data.test.y.numpy())
    test = load_server_test(str(tmp_path / "test.npz"), IN_ORDER, SampleSchema.of(data), model)
    _, history = federate(remote(method, tmp_path, test=test), TWO)
    _, simulated = toy.looped(method, model, data, rounds=2)
    for found, expected in zip(history, simulated, strict=True):
        if ("global", "test") not in expected.scores:  # the final step
            continue
        (own,), there = zip(*found.scores["global", "test"], strict=True), expected.summary("global")
        assert (int(own[0]), int(own[2])) == (SERVER, sum(toy.TEST_SIZES))
        assert found.summary("global").mean == there.by_samples
        assert float(own[3]) == pytest.approx(there.loss, rel=1e-6)
        assert toy.rows(found.scores["pre", "test"]) == toy.rows(expected.scores["pre", "test"])


def test_samples_of_the_server_that_do_not_fit(tmp_path: Path) -> None:
    method, model, data = direct.small("ditto")
    schema, agreed = SampleSchema.of(data), direct.agreement(method, model, data)
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 1, 12, 13), np.uint8), y=np.zeros(3, np.int64))
    with pytest.raises(CoterieError, match=r"x has the shape \(3, 1, 12, 13\); expected \(samples, 1, 12, 12\)"):
        server_test(Service(num_clients=5, test=str(tmp_path / "wide.npz")), schema, agreed)
    with pytest.raises(CoterieError, match=r"fashion-mnist has samples of shape 1 x 28 x 28"):
        server_test(Service(num_clients=5, test="fashion-mnist"), schema, agreed)
    with pytest.raises(CoterieError, match=r"FedPer has none that the server can read"):
        server_test(Service(num_clients=5, test="x.npz"), schema, direct.agreement(toy.method("fedper"), model, data))
    with pytest.raises(CoterieError, match=r"--label-column and --labels are for the samples of --test"):
        Service(num_clients=5, labels="in-order")
