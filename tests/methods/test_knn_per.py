"""kNN-Per against loops over samples and neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Backend, Looped, Stacked
from coterie.federation import Settings, federate
from coterie.methods.knn_per import Datastore, Down, KNNPer, State
from tests import toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5)


def run(kind: Any, method: KNNPer, data: FederatedData) -> tuple[Any, Backend, Any]:
    clients = kind(method, toy.model(), data, 7)
    server, history = federate(clients, Settings(rounds=2, join_ratio=0.6, seed=7))
    return server, clients, history


def normalised(x: Tensor) -> Tensor:
    return (x.double() / 255 - 0.5) / 0.5


def plain_probabilities(server: Any, data: FederatedData, method: KNNPer, client: int) -> list[list[float]]:
    net: Any = toy.network().double()
    names = {**server.weights.encoder, **{f"{len(net) - 1}.{n}": t for n, t in server.weights.head.items()}}
    net.load_state_dict(names)
    x, labels = data.train.client(client)
    with torch.no_grad():
        memory = [(z.tolist(), k) for z, k in zip(net[:-1](normalised(x)), labels.tolist(), strict=True)]
        tests = normalised(data.test.client(client)[0])
        queries, model_says = net[:-1](tests).tolist(), net(tests).softmax(1).tolist()
    found = []
    for query, said in zip(queries, model_says, strict=True):
        near = sorted((sum((a - b) ** 2 for a, b in zip(query, z, strict=True)), k) for z, k in memory)
        near = near[: method.neighbours]
        kernel = [math.exp(-distance / (len(query) * method.width)) for distance, _ in near]
        votes = [sum(w for w, (_, k) in zip(kernel, near, strict=True) if k == c) for c in range(toy.CLASSES)]
        found.append([method.vote * v / sum(kernel) + (1 - method.vote) * p for v, p in zip(votes, said, strict=True)])
    return found


@pytest.mark.parametrize("kind", [Looped, Stacked])
@pytest.mark.parametrize("settings", [{}, {"neighbours": 3, "vote": 0.8, "width": 0.01}, {"neighbours": 100}])
def test_predictions_equal_the_plain_implementation(kind: Any, settings: dict[str, Any]) -> None:
    """Training is augmented, the datastore is not; clients have from 1 to 31 samples, most fewer than neighbours."""
    method, data = KNNPer(train=SGD, **settings), toy.toy()
    server, clients, history = run(kind, method, data)
    scores = history[-1].scores["finished", "test"]
    for i in range(data.num_clients):
        x, y = data.test.client(i)
        logits = method.client_predict(toy.model(), clients.states[i], Down(server.weights), x)
        expected = torch.tensor(plain_probabilities(server, data, method, i), dtype=torch.float64)
        torch.testing.assert_close(logits.exp(), expected, rtol=1e-9, atol=1e-12)
        assert scores.weighted[i] == (expected.argmax(1) == y).sum()
        torch.testing.assert_close(scores.loss[i], -expected[torch.arange(len(y)), y].log().mean())


def test_training_is_fedavg() -> None:
    data = toy.toy()
    server, _, history = run(Looped, KNNPer(train=SGD), data)
    averaged, expected = toy.looped(toy.method("fedavg", momentum=0.5, weight_decay=0.0), toy.model(), data, rounds=2)
    found = {f"weights.{part}.{n}": t for part in ("encoder", "head") for n, t in getattr(server.weights, part).items()}
    toy.assert_same(found, {n.removeprefix("server."): t for n, t in averaged.items() if n.startswith("server.")})
    assert toy.rows(history[1].scores["pre", "test"]) == toy.rows(expected[1].scores["pre", "test"])


def test_without_a_vote_it_is_fedavg() -> None:
    _, _, history = run(Looped, KNNPer(train=SGD, vote=0.0), toy.toy())
    finished, shared = history[-1].scores["finished", "test"], history[-2].scores["global", "test"]
    assert finished.weighted.tolist() == shared.weighted.tolist()
    torch.testing.assert_close(finished.loss, shared.loss, rtol=1e-12, atol=0)


def test_padding_is_nobodys_neighbour() -> None:
    """Rows of zeros that would be the nearest of all, and of another class."""
    method, z = KNNPer(neighbours=4), torch.zeros(1, 2, dtype=torch.float64)
    near = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    real = torch.tensor([True, True, False, False])
    votes = method.votes(Datastore(near, torch.tensor([1, 2, 0, 0]), real), z, 3)
    kernel = torch.tensor([0.0, math.exp(-1 / 2), math.exp(-4 / 2)], dtype=torch.float64)  # squared, by 2 features
    torch.testing.assert_close(votes, (kernel / kernel.sum())[None])


def test_a_class_without_any_vote_has_a_finite_loss() -> None:
    method, model = KNNPer(vote=1.0), toy.model()
    store = Datastore(torch.zeros(1, 8, dtype=torch.float64), torch.tensor([2]), torch.tensor([True]))
    logits = method.client_predict(model, State({}, store), Down(model.start), toy.toy().test.x[:3])
    assert logits.isfinite().all()
    assert logits.argmax(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("settings", [{"neighbours": 0}, {"vote": 1.5}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CoterieError):
        KNNPer(**settings)
