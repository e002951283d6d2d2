"""Metrics of a client's model, for the primary metric of a task."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score

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
