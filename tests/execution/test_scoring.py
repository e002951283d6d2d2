"""Metrics of a client's model, for the primary metric of a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor
from torch.utils.data import TensorDataset

import coterie
from coterie.core.errors import CoterieError
from coterie.core.task import Classification
from coterie.execution import Looped, Stacked
from coterie.execution.requests import send
from tests import toy


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy"])
def test_the_primary_metric_of_every_client(metric: str) -> None:
    """Looped and stacked, with padding: the number that scikit-learn gives for the client's own outputs."""
    task, method = Classification(toy.CLASSES, metric=metric), toy.method("fedavg")
    data = replace(toy.toy(augmented=False), task=task)
    model = replace(toy.model(), task=task.double())
    x, y = data.test.client(3)
    predicted = model(model.start, x).argmax(1)
    right = float((predicted == y).double().mean())
    expected = balanced_accuracy_score(y, predicted) if metric == "balanced_accuracy" else right
    found = []
    for backend in (Looped(method, model, data, 7, processes=1), Stacked(method, model, data, 7)):
        server = method.server_init(model, backend.census)
        backend.join(method.server_welcome(server))
        everyone = torch.arange(5)
        own, shared = (
            backend.score(everyone, send(method, server, everyone), "test"),
            backend.score_global(server, "test"),
        )
        assert shared is not None
        torch.testing.assert_close(own.value, shared.value)
        found.append(own.value)
        assert float(own.value[3]) == pytest.approx(expected)
        backend.close()
    torch.testing.assert_close(found[0], found[1])


def own_task(compute: Any) -> type[coterie.Task]:
    """Regression with a metric of the user's own."""

    class Own(coterie.Task):
        name = "own"
        label_type = torch.float32
        width = 1

        def __init__(self, metric: str | None = None) -> None:
            super().__init__([coterie.OutputMetric("error", compute, higher=False, share=False)], metric)

        def loss(self, output: Tensor, y: Tensor) -> Tensor:
            return (output - y).square().mean(1)

    return Own


def own_run(compute: Any) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    clients = [TensorDataset(x := torch.randn(20, 3, generator=draw), x[:, :1]) for _ in range(2)]
    data = coterie.clients_from(clients, task=own_task(compute))
    looped = coterie.Execution(backend="looped", processes=1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    result = coterie.run("fedavg", data, network, rounds=1, progress=False, backend=looped)
    return list(result.clients["error"])


def absolute(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).abs().mean()


@pytest.mark.long
def test_an_own_metric_may_return_any_number() -> None:
    expected = own_run(absolute)
    for form in (float, Tensor.numpy, np.float32):
        assert own_run(lambda output, y, form=form: form(absolute(output, y))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda output, y: (output - y).abs(), r"the metric 'error' returns values of shape \(5, 1\)"),
        (lambda output, y: "good", "the metric 'error' returns a str; it must return one number"),
        (lambda output, y: 1 / 0, "the metric 'error' failed: ZeroDivisionError"),
    ],
)
def test_an_own_metric_is_tried_before_the_run(compute: Any, says: str) -> None:
    with pytest.raises(CoterieError, match=says):
        own_run(compute)
