"""Clients as branches of their own: recorded once, replayed for clients of the same size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coterie.execution import Looped, Stacked, Streams
from coterie.execution.backend import LocalBackend
from coterie.execution.graphs import Graphs
from coterie.execution.requests import send
from coterie.methods.fedavg import FedAvg
from tests import toy
from tests.fake_graphs import FakeGraphs


@pytest.mark.parametrize("kind", [Stacked, Streams])
def test_every_metric_after_the_primary_one(kind: type[Stacked | Streams]) -> None:
    """Both are scores of the same samples, but the recording of one is not that of the other."""
    method, model, data = toy.method("fedavg"), toy.model(), toy.toy()

    def every(clients: LocalBackend) -> torch.Tensor:
        server = method.server_init(clients.model, clients.census)
        clients.join(method.server_welcome(server))
        downs = send(method, server, clients.everyone)
        clients.score(clients.everyone, downs, "test")
        return clients.every("score", clients.everyone, downs)

    clients = kind(method, model, data, 7)
    record(clients)
    expected = every(Looped(method, model, data, 7, processes=1))
    torch.testing.assert_close(every(clients), expected, equal_nan=True)


def record(clients: Stacked | Streams, recorder: type[FakeGraphs] = FakeGraphs) -> None:
    if isinstance(clients, Stacked):
        clients.graphs = Graphs(recorder())
    else:
        for branch in clients.branches:
            branch.graphs = Graphs(recorder(), shared=True)


class FailingGraphs(FakeGraphs):
    def record(self, body: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\n(more lines)")


@pytest.mark.parametrize("kind", [Stacked, Streams])
def test_what_cannot_be_recorded_is_computed(kind: type[Stacked | Streams], caplog: pytest.LogCaptureFixture) -> None:
    method, model, data = toy.method("fedper"), toy.model(), toy.toy()
    expected, _ = toy.outcome(kind(method, model, data, 7), rounds=2)
    clients = kind(method, model, data, 7)
    record(clients, FailingGraphs)
    found, _ = toy.outcome(clients, rounds=2)
    toy.assert_same(expected, found)
    (said,) = caplog.messages
    assert said.endswith("cannot be recorded: operation not permitted when stream is capturing")


@pytest.mark.parametrize("kind", [Stacked, Streams])
def test_an_error_of_the_computation_itself_is_raised(kind: type[Stacked | Streams]) -> None:
    """Recorded or not, it fails."""

    class Broken(FedAvg):
        def client_train(self, *given: Any) -> Any:
            raise RuntimeError("shapes do not match")

    clients = kind(Broken(train=toy.method("fedavg").train), toy.model(), toy.toy(), 7)
    record(clients)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        toy.outcome(clients, rounds=1)
