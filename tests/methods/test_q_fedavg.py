"""q-FedAvg against plain loops written from algorithm 2 of its paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.q_fedavg import Up, qFedAvg
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def plainly(q: float, steep: float, by_samples: bool, batch_norm: bool) -> dict[str, Tensor]:
    data, w = plain.data(), plain.copy(toy.network(batch_norm).double())
    sizes = data.train.sizes
    for joined, turn in plain.ROUNDS:
        total = sum(sizes[i] for i in joined)
        p = {i: sizes[i] / total if by_samples else 1 / len(joined) for i in joined}
        deltas, h, statistics = dict.fromkeys(w, 0.0), 0.0, dict.fromkeys(w, 0.0)
        for i in joined:
            loss, trained = plain.mean_loss(w, data, i), plain.locally(w, data, i, turn, SGD)
            gradient = {n: steep * (w[n] - trained[n]) for n in w}  # Δw_k
            square = sum(float(g.square().sum()) for n, g in gradient.items() if "running" not in n)
            h += p[i] * (q * loss ** (q - 1) * square + steep * loss**q)
            deltas = {n: deltas[n] + p[i] * loss**q * g for n, g in gradient.items()}  # type: ignore[misc]
            statistics = {n: statistics[n] + p[i] * trained[n] for n in w}  # type: ignore[misc]
        w = {n: statistics[n] if "running" in n else w[n] - deltas[n] / h for n in w}  # type: ignore[misc]
    return w


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(("q", "steep"), [(0.0, None), (1.0, None), (0.3, 2.0), (5.0, None)])
@pytest.mark.parametrize("by_samples", [False, True])
def test_three_rounds_equal_the_plain_implementation(
    q: float, steep: float | None, by_samples: bool, batch_norm: bool
) -> None:
    method = qFedAvg(train=SGD, fairness=q, lipschitz=steep, weight_by_samples=by_samples)
    server, _ = plain.federation(method, plain.data(), toy.model(batch_norm=batch_norm))
    expected = plainly(q, steep or 1 / SGD.lr, by_samples, batch_norm)
    plain.assert_close(plain.named(server.weights, toy.network(batch_norm)), expected)


def test_without_fairness_it_is_fedavg() -> None:
    found, _ = toy.looped(qFedAvg(train=SGD, fairness=0.0), toy.model(), toy.toy())
    expected, _ = toy.looped(FedAvg(train=SGD), toy.model(), toy.toy())
    assert toy.distance(found, {n: t for n, t in expected.items() if "tuned" not in n}) < 1e-12


def up(weights: list[float], losses: list[float], samples: list[float]) -> Any:
    start = toy.model().start
    rows = [tree.apply(lambda t, v=v: torch.full_like(t, v), start) for v in weights]
    return Up(tree.stack(rows), torch.tensor(losses).double(), torch.tensor(samples).double())


def test_two_clients_by_hand() -> None:
    """From zero to +1 and -1 in each of P weights; losses 4 and 1; q = 1, L = 1.

    Δ = 4 (0 - 1) + 1 (0 + 1) = -3; h = (P + 4) + (P + 1) = 2 P + 5; the step is 3 / (2 P + 5).
    """
    method = qFedAvg(train=SGD, fairness=1.0, lipschitz=1.0)
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    server = tree.apply(torch.zeros_like, server)
    count = sum(t.numel() for t in tree.leaves(server))
    after = method.server_receive(server, torch.tensor([0, 1]), up([1.0, -1.0], [4.0, 1.0], [7.0, 7.0]))
    for t in tree.leaves(after):
        torch.testing.assert_close(t, torch.full_like(t, 3 / (2 * count + 5)))


def test_a_client_without_loss_counts_nothing_and_divides_nothing() -> None:
    method = qFedAvg(train=SGD, fairness=0.5)
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    after = method.server_receive(server, torch.tensor([0, 1]), up([1.0, 1.0], [0.0, 0.0], [7.0, 7.0]))
    assert all(t.isfinite().all() for t in tree.leaves(after))


def test_a_worse_client_pulls_harder() -> None:
    """The larger q, the closer the step's direction to that of the client with the larger loss."""
    directions = []
    for q in (0.0, 1.0, 3.0):
        method = qFedAvg(train=SGD, fairness=q)
        server, _ = plain.federation(method, plain.data(), toy.model(), [])
        server = tree.apply(torch.zeros_like, server)
        ups = up([1.0, 0.0], [4.0, 1.0], [7.0, 7.0])
        ups = ups._replace(weights=ups.weights._replace(head={n: t.flip(0) for n, t in ups.weights.head.items()}))
        after = method.server_receive(server, torch.tensor([0, 1]), ups)
        directions.append(float(after.weights.encoder["0.bias"][0] / after.weights.head["bias"][0]))
    assert directions == pytest.approx([1.0, 4.0, 64.0])


def test_a_negative_loss_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Lying(qFedAvg):
        def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
            state, up = super().client_train(model, state, down, data)
            return state, up._replace(loss=torch.where(data.samples == 13, -1.0, up.loss))

    toy.looped(Lying(train=SGD), toy.model(), toy.toy(), rounds=1, join_ratio=1.0)
    assert "client 0 is left out" in caplog.text
    assert "`loss` has -1, below 0" in caplog.text


def test_adam_is_refused() -> None:
    clients = plain.Looped(qFedAvg(train=LocalTraining(optimizer="adam")), toy.model(), toy.toy(), 7, processes=1)
    with pytest.raises(CoterieError, match="q-FedAvg needs optimizer=sgd, got adam"):
        clients.rehearse()


@pytest.mark.long
def test_losses_become_more_even() -> None:
    """On a convex problem in which two of three clients agree, the third is better off."""
    data, model = plain.line()
    sgd = LocalTraining(local_epochs=1, batch_size=12, lr=0.3)
    rounds = [([0, 1, 2], Turn(t)) for t in range(150)]
    spread = []
    for q in (0.0, 3.0):
        server, _ = plain.federation(qFedAvg(train=sgd, fairness=q), data, model, rounds)
        w, b = (server.weights.head[n] for n in ("weight", "bias"))
        losses = [float(torch.nn.functional.cross_entropy(x @ w.T + b, y)) for x, y in map(data.train.client, range(3))]
        spread.append((max(losses), torch.tensor(losses).var().item()))
    assert spread[1][0] < spread[0][0]
    assert spread[1][1] < spread[0][1]
