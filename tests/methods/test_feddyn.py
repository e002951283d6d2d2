"""FedDyn against a loop in the authors' form, where the server knows every g, and against the optimum it must reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Stacked, Turn
from coterie.federation import Settings, federate
from coterie.methods.fedavg import FedAvg
from coterie.methods.feddyn import FedDyn, Server, broadcast
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


class Plain:
    """The server keeps the g of every client; it broadcasts the mean of the participants plus the mean of ALL g."""

    def __init__(self, data: FederatedData, method: FedDyn, batch_norm: bool) -> None:
        self.data, self.method, self.batch_norm = data, method, batch_norm
        net = toy.network(batch_norm).double()
        self.weights = self.mean = plain.copy(net)
        self.drifts = [{n: torch.zeros_like(p) for n, p in net.named_parameters()} for _ in data.train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        models = [self.client(i, turn) for i in joined]
        self.mean = plain.mean(models, [1.0] * len(models))
        lean = plain.mean(self.drifts, [1.0] * self.data.num_clients)
        self.weights = {n: t + lean[n] if n in lean else t for n, t in self.mean.items()}

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        sizes, sgd, method = self.data.train.sizes, self.method.train, self.method
        alpha = method.pull / (sizes[i] / (sum(sizes) / len(sizes)))
        net = toy.network(self.batch_norm).double()
        net.load_state_dict(self.weights, strict=False)
        optimiser = plain.optimiser(net.parameters(), sgd, turn)
        for x, y in plain.batches(self.data, i, turn, sgd):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            away = {n: p.detach() - self.weights[n] for n, p in net.named_parameters()}
            length = torch.cat([t.flatten() for t in away.values()]).norm()
            for n, p in net.named_parameters():
                if method.norm == "squared":
                    p.grad += alpha * (away[n] + self.drifts[i][n])  # type: ignore[operator]
                else:  # as others have it: a pull of the same length wherever the client is
                    p.grad += alpha * ((away[n] / length / 2 if length > 0 else 0) + self.drifts[i][n])  # type: ignore[operator]
            torch.nn.utils.clip_grad_norm_(net.parameters(), sgd.clip_gradient or method.largest_gradient)
            optimiser.step()
        trained = plain.copy(net)
        self.drifts[i] = {n: g + trained[n] - self.weights[n] for n, g in self.drifts[i].items()}
        return trained


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(
    "changes",
    [{"pull": 0.5}, {"pull": 0.5, "norm": "unsquared"}, {"pull": 0.5, "largest_gradient": 0.3}],
    ids=["squared", "unsquared", "clipped"],
)
def test_three_rounds_equal_the_plain_implementation(changes: dict[str, Any], batch_norm: bool) -> None:
    data, method = plain.data(), FedDyn(train=SGD, **changes)
    expected = Plain(data, method, batch_norm)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model(batch_norm=batch_norm))
    net = toy.network(batch_norm)
    plain.assert_close(plain.named(broadcast(server), net), expected.weights)
    plain.assert_close(plain.named(server.mean, net), expected.mean)
    for i, drift in enumerate(expected.drifts):
        last = len(net) - 1  # type: ignore[arg-type]
        found = clients.states[i].drift
        plain.assert_close(
            {n.removeprefix("encoder.").replace("head.", f"{last}."): t for n, t in found.items()}, drift
        )


def test_the_clip_of_local_training_comes_first() -> None:
    tight, loose = (
        plain.federation(FedDyn(train=SGD.but(clip_gradient=0.1), largest_gradient=g), plain.data(), toy.model())[0]
        for g in (0.2, 10.0)
    )
    toy.assert_same(tree.flatten(tight), tree.flatten(loose))
    free, _ = plain.federation(FedDyn(train=SGD), plain.data(), toy.model())
    assert toy.distance(tree.flatten(free), tree.flatten(loose)) > 1e-3


def test_pull_is_weaker_for_clients_with_more_samples() -> None:
    """alpha / (n_i / mean n), also where clients are padded to the longest."""
    data, method = plain.data(), FedDyn(pull=0.02)
    stacked = Stacked(method, toy.model(), data, 0)
    stacked.join(method.server_welcome(method.server_init(stacked.model, stacked.census)))
    _, looped = plain.federation(method, data, toy.model(), [])
    expected = [0.02 * 16.2 / n for n in (13, 20, 9, 31, 8)]
    for clients in (stacked, looped):
        assert [float(clients.states[i].pull) for i in range(5)] == pytest.approx(expected, rel=1e-12)


def test_the_first_round_without_pull_is_fedavg_with_equal_weights() -> None:
    """Then all that differs is what the server adds to the mean."""
    everyone = [(list(range(5)), Turn(0))]
    data = toy.toy(train=(9, 9, 9, 9, 9), augmented=False)
    server, _ = plain.federation(FedDyn(train=SGD, pull=0.0, largest_gradient=1e9), data, toy.model(), everyone)
    averaged, _ = plain.federation(FedAvg(train=SGD), data, toy.model(), everyone)
    assert toy.distance(tree.flatten(server.mean), tree.flatten(averaged.weights)) < 1e-12
    start, sent = tree.flatten(toy.model().start), tree.flatten(broadcast(server))
    for name, mean in tree.flatten(averaged.weights).items():  # w = mean + (mean - w0): as far again
        torch.testing.assert_close(sent[name], mean + mean - start[name], rtol=1e-9, atol=1e-11)


@pytest.mark.long
def test_it_reaches_the_optimum_of_all_where_fedavg_does_not() -> None:
    """Also when only two of three clients take part: the g of the absent one counts."""
    data, model = plain.line()
    sgd = LocalTraining(local_epochs=5, batch_size=12, lr=0.5, weight_decay=0.05)
    rounds = [(sorted([t % 3, (t + 1) % 3]), Turn(t)) for t in range(100)]
    server, _ = plain.federation(FedDyn(train=sgd, pull=0.5), data, model, rounds)
    averaged, _ = plain.federation(FedAvg(train=sgd), data, model, [([0, 1, 2], Turn(t)) for t in range(50)])
    assert plain.slope(broadcast(server), data, 0.05) < 1e-12
    assert plain.slope(averaged.weights, data, 0.05) > 0.01


def test_broadcast_and_mean_can_both_be_measured() -> None:
    model, data = toy.model(), toy.toy()
    x = data.test.x[:6]
    for method in (toy.method("feddyn"), toy.method("feddyn", test_mean=True)):
        server, _ = plain.federation(method, data, model)
        assert isinstance(server, Server)
        logits = method.server_predict(model, server, x)
        assert logits is not None
        expected = server.mean if method.test_mean else broadcast(server)  # type: ignore[attr-defined]
        assert torch.equal(logits, model(expected, x))
        sent = method.server_send(server, torch.tensor(0))
        assert torch.equal(method.client_predict(model, None, sent, x), model(broadcast(server), x))
        assert not torch.equal(model(server.mean, x), model(broadcast(server), x))
    _, history = federate(Stacked(toy.method("feddyn"), model, data, 7), Settings(rounds=2, seed=7))
    scores = history[-1].scores
    assert scores["pre", "test"].weighted.tolist() == scores["global", "test"].weighted.tolist()


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(CoterieError, match="did you mean 'squared'"):
        FedDyn(norm="sqared")
