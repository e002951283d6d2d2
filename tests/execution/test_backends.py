"""Where clients run: what is refused, what is put together, what happens to a worker that dies."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Weights, make_model
from coterie.execution import Looped, Request, Stacked, Turn, looped
from coterie.execution.looped import channels_last, packed, unpacked
from coterie.execution.requests import send
from coterie.methods import METHODS
from tests import toy


@pytest.mark.parametrize("name", ["processes", "cohort", "ray_workers"])
def test_none_at_all_is_too_few(name: str) -> None:
    with pytest.raises(CoterieError, match=f"{name} must be at least 1, got 0"):
        coterie.Execution(**{name: 0})  # type: ignore[arg-type]


def test_what_draws_from_the_stream_of_torch_is_looped_only() -> None:
    """Its draws are the client's own: as many processes as you like, and the same result."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.RReLU(), nn.Linear(8, toy.CLASSES))
    model = make_model(net, toy.SHAPE, toy.CLASSES)
    with pytest.raises(CoterieError, match=r"cannot be stacked, .* in 2 \(RReLU\)"):
        Stacked(toy.method("fedavg"), model, toy.toy(), 0)
    one, _ = toy.looped(toy.method("fedavg"), model, toy.toy())
    toy.assert_same(one, toy.looped(toy.method("fedavg"), model, toy.toy(), processes=2)[0])


@pytest.mark.parametrize("drop_last", [False, True])
def test_batchnorm_leaves_padding_out(drop_last: bool) -> None:
    """Batches of 8: clients of 13, 21 and 45 samples all end with five, which padding fills up."""
    data = toy.toy(train=(13, 48, 45, 21, 40, 48, 13), test=(3,) * 7)
    method, model = toy.method("fedavg", drop_last=drop_last), toy.model(batch_norm=True)
    request, clients = Request("train"), Stacked(method, model, data, 0)
    together = sorted(c.clients.tolist() for c in clients.cohorts(request, torch.arange(7)))
    assert together == [[0, 3, 6], [1, 2, 4, 5]]
    expected, _ = toy.looped(method, model, data, join_ratio=1.0)
    assert toy.distance(expected, toy.stacked(method, model, data, join_ratio=1.0)[0]) < 1e-10


@pytest.mark.parametrize("ragged", [False, True])
def test_batchnorm_in_half_precision(ragged: bool) -> None:
    data = toy.toy(train=(13, 16, 12) if ragged else (16,) * 3, test=(9, 8, 8) if ragged else (8,) * 3)
    method, model = toy.method("fedavg"), replace(toy.model(torch.float32, batch_norm=True), precision="bf16")
    expected, _ = toy.looped(method, model, data, join_ratio=1.0)
    assert toy.distance(expected, toy.stacked(method, model, data, join_ratio=1.0)[0]) < 0.03


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


@pytest.mark.parametrize("norm", [OwnNorm(4), nn.InstanceNorm2d(4, track_running_stats=True)])
def test_other_layers_that_mix_samples_meet_no_padding(norm: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(400, toy.CLASSES))
    data, model = toy.toy(train=(13, 11, 13), test=(4, 3, 3)), make_model(net, toy.SHAPE, toy.CLASSES)
    clients, method = Stacked(toy.method("fedavg"), model, data, 0), toy.method("fedavg")
    for request, together in ((Request("train"), [[1], [0, 2]]), (Request("score", "test"), [[1, 2], [0]])):
        assert [c.clients.tolist() for c in clients.cohorts(request, torch.arange(3))] == together
    model = model.to("cpu", torch.float64)
    expected, _ = toy.looped(method, model, data, join_ratio=1.0)
    assert toy.distance(expected, toy.stacked(method, model, data, join_ratio=1.0)[0]) < 1e-10


def test_a_network_that_folds_its_batch_cannot_be_padded() -> None:
    net = nn.Sequential(nn.Flatten(0, 2), nn.BatchNorm1d(12), nn.Unflatten(0, (-1, 12)), nn.Flatten())
    net.append(nn.Linear(144, toy.CLASSES))
    with pytest.raises(CoterieError, match=r"given 96 samples where the batch has 8.* use backend=looped"):
        toy.stacked(toy.method("fedavg"), make_model(net, toy.SHAPE, toy.CLASSES), toy.toy())


@pytest.mark.parametrize("kind", ["looped", "stacked"])
def test_batchnorm_without_running_statistics_tests_by_batch(kind: str) -> None:
    """What a client's test samples give must not depend on who is tested beside it."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten())
    net.append(nn.Linear(400, toy.CLASSES))
    data = toy.toy(augmented=False)
    result = coterie.run(toy.method("fedavg"), data, net.double(), rounds=1, backend=kind)
    assert result.model.tests_by_batch
    for i in range(5):
        x, y = data.test.client(i)
        right = (result.model(result.server.weights, x).argmax(1) == y).sum()
        assert int(result.history[0].scores["pre", "test"].weighted[i]) == int(right)


def test_a_worker_that_dies_is_told() -> None:
    clients = Looped(toy.method("fedavg"), toy.model(), toy.toy(), 0, processes=2)
    server = clients.method.server_init(clients.model, clients.census)
    clients.join({})
    assert clients.pool is not None
    for process in list(clients.pool._processes):
        os.kill(process, signal.SIGKILL)
    everyone = torch.arange(5)
    with pytest.raises(CoterieError, match="a worker process died"):
        clients.train(everyone, send(clients.method, server, everyone), Turn(0))
    clients.close()


def test_processes_that_die_as_they_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looped, "start_worker", lambda runner: os._exit(1))
    with pytest.raises(CoterieError, match="a worker process died"):
        Looped(toy.method("fedavg"), toy.model(), toy.toy(), 0, processes=2)


def test_workers_killed_in_the_middle_of_an_answer() -> None:
    """The pool has read how long it is, and waits for the rest."""
    clients = Looped(toy.method("fedavg"), toy.model(), toy.toy(), 0, processes=2)
    assert clients.pool is not None
    answers: Any = clients.pool._result_queue
    os.write(answers._writer.fileno(), (1000).to_bytes(4, "big") + b"the first bytes of it")
    ended = threading.Thread(target=clients.abandon, daemon=True)
    ended.start()
    ended.join(20)
    assert not ended.is_alive()


def test_what_goes_to_workers_comes_back_the_same() -> None:
    same = torch.randn(2).expand(1000, 2)
    given = (Weights({"a": torch.randn(2, 3)}, {}), torch.tensor(4), (), {"b": same}, Turn(3, 0.5), "test")
    parcel = packed(given)
    assert len(pickle.dumps(parcel)) < 2000
    back = unpacked(parcel)
    assert type(back[0]) is Weights
    assert back[2:3] == ((),)
    assert back[4:] == (Turn(3, 0.5), "test")
    toy.assert_same(tree.flatten(back[:4]), tree.flatten(given[:4]))


@pytest.mark.parametrize("channels", [1, 3])
def test_batches_of_images_are_channels_last(channels: int) -> None:
    x = channels_last(torch.randint(0, 256, (20, channels, 6, 6), dtype=torch.uint8))
    assert x[torch.tensor([3, 1])].stride() == (36 * channels, 1, 6 * channels, channels)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_on_the_gpu_as_on_the_cpu(name: str, batch_norm: bool) -> None:
    """Five rounds, so that the graph is captured and replayed."""
    method, model = toy.method(name), toy.model(batch_norm=batch_norm)
    data = toy.toy(train=(16, 24, 8, 24, 16))
    expected, _ = toy.looped(method, model, data, rounds=5, join_ratio=1.0)
    clients = Stacked(method, model, data, 7, device="cuda")
    found, _ = toy.outcome(clients, rounds=5, join_ratio=1.0)
    assert clients.graphs.captured
    assert toy.distance(expected, {name: t.cpu() for name, t in found.items()}) < 1e-10
