"""Clients as branches of their own: recorded once, replayed for clients of the same size."""

from __future__ import annotations

import pytest
import torch

from coterie.execution import Looped, Stacked, Streams
from coterie.execution.backend import LocalBackend
from coterie.execution.graphs import Graphs
from coterie.execution.requests import send
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


def record(clients: Stacked | Streams) -> None:
    if isinstance(clients, Stacked):
        clients.graphs = Graphs(FakeGraphs())
    else:
        for branch in clients.branches:
            branch.graphs = Graphs(FakeGraphs(), shared=True)
