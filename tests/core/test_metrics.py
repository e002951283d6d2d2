"""Metrics are those of scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from coterie.core import metrics
from coterie.core.metrics import Metric
from coterie.core.task import Classification
from coterie.core.tasks import TASKS, MultiLabel, NextToken, Regression, Segmentation

SEEDS = range(8)


def named(task: object) -> dict[str, Metric]:
    return {metric.name: metric for metric in task.metrics}  # type: ignore[attr-defined]


def logits(seed: int, n: int, classes: int, ties: bool = True) -> tuple[Tensor, Tensor]:
    """Outputs with ties, and labels that follow them somewhat."""
    g = torch.Generator().manual_seed(seed)
    output = torch.randn(n, classes, generator=g)
    if ties:
        output = (2 * output).round() / 2
    y = (output + torch.randn(n, classes, generator=g)).argmax(1)
    return output, y


@pytest.mark.parametrize("seed", SEEDS)
def test_two_classes(seed: int) -> None:
    output, y = logits(seed, 60, 2)
    got = {name: float(metric(output, y)) for name, metric in named(Classification(2)).items()}
    probability, predicted = output.double().softmax(1)[:, 1].numpy(), output.argmax(1).numpy()
    expected = {
        "accuracy": sk.accuracy_score(y, predicted),
        "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
        "macro_f1": sk.f1_score(y, predicted, average="macro"),
        "sensitivity": sk.recall_score(y, predicted),
        "specificity": sk.recall_score(y, predicted, pos_label=0),
        "auroc": sk.roc_auc_score(y, probability),
        "average_precision": sk.average_precision_score(y, probability),
    }
    assert got.pop("calibration_error") == pytest.approx(by_bins(output, y))
    assert got == pytest.approx(expected, abs=1e-12)


def test_the_positive_class_of_two_can_be_the_first() -> None:
    output, y = logits(0, 60, 2)
    got = {name: float(metric(output, y)) for name, metric in named(Classification(2, positive=0)).items()}
    plain = {name: float(metric(output, y)) for name, metric in named(Classification(2)).items()}
    probability, predicted = output.double().softmax(1)[:, 0].numpy(), output.argmax(1).numpy()
    assert got["sensitivity"] == pytest.approx(sk.recall_score(y, predicted, pos_label=0))
    assert got["specificity"] == pytest.approx(sk.recall_score(y, predicted, pos_label=1))
    assert got["average_precision"] == pytest.approx(sk.average_precision_score(y, probability, pos_label=0))
    assert got["auroc"] == pytest.approx(plain["auroc"])
    assert got["sensitivity"] != plain["sensitivity"]


@pytest.mark.parametrize("seed", SEEDS)
def test_several_classes(seed: int) -> None:
    output, y = logits(seed, 120, 5)
    got = {name: float(metric(output, y)) for name, metric in named(Classification(5)).items()}
    probability, predicted = output.double().softmax(1).numpy(), output.argmax(1).numpy()
    one_hot = np.eye(5)[y.numpy()]
    expected = {
        "accuracy": sk.accuracy_score(y, predicted),
        "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
        "macro_f1": sk.f1_score(y, predicted, average="macro"),
        "auroc": sk.roc_auc_score(y, probability, multi_class="ovr", average="macro"),
        "average_precision": sk.average_precision_score(one_hot, probability, average="macro"),
        "calibration_error": by_bins(output, y),
    }
    assert got == pytest.approx(expected, abs=1e-12)
    assert metrics.confusion(output, y).tolist() == sk.confusion_matrix(y, predicted, labels=range(5)).tolist()
    assert metrics.class_f1(output, y).numpy() == pytest.approx(sk.f1_score(y, predicted, average=None))


def by_bins(output: Tensor, y: Tensor) -> float:
    """The expected calibration error, bin by bin."""
    confidence, predicted = output.double().softmax(1).max(1)
    total = 0.0
    for b in range(metrics.BINS):
        inside = (confidence > b / metrics.BINS) & (confidence <= (b + 1) / metrics.BINS)
        if inside.any():
            right = (predicted == y)[inside].double().mean()
            total += float(inside.double().mean() * (confidence[inside].mean() - right).abs())
    return total


def test_a_class_that_a_client_lacks_has_no_part() -> None:
    output, y = logits(0, 50, 4)
    y = y % 3  # class 3 is predicted but does not occur
    predicted = output.argmax(1)
    found = named(Classification(4))
    assert float(found["balanced_accuracy"](output, y)) == pytest.approx(
        sk.recall_score(y, predicted, average=None, labels=[0, 1, 2]).mean()
    )
    assert float(found["macro_f1"](output, y)) == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    one = torch.zeros(50, dtype=torch.int64)
    assert math.isnan(float(found["auroc"](output, one)))  # there is only one class


@pytest.mark.parametrize("seed", SEEDS)
def test_several_labels(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    output = (2 * torch.randn(80, 4, generator=g)).round() / 2
    y = (output + torch.randn(80, 4, generator=g) > 0.3).float()
    got = {name: float(metric(output, y)) for name, metric in named(MultiLabel(4)).items()}
    predicted = (output > 0).long()
    expected = {
        "micro_f1": sk.f1_score(y, predicted, average="micro"),
        "macro_f1": sk.f1_score(y, predicted, average="macro"),
        "exact_match": sk.accuracy_score(y, predicted),
        "auroc": sk.roc_auc_score(y, output, average="macro"),
        "average_precision": sk.average_precision_score(y, output, average="macro"),
    }
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_in_their_units(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    task = Regression(2, mean=(100.0, -3.0), std=(15.0, 0.5)).double()
    network = torch.randn(70, 2, generator=g, dtype=torch.float64)
    output = task.scale(network)
    y = output + torch.randn(70, 2, generator=g, dtype=torch.float64) * torch.tensor([5.0, 0.2], dtype=torch.float64)
    got = {name: float(metric(output, y)) for name, metric in named(task).items()}
    expected = {
        "rmse": math.sqrt(sk.mean_squared_error(y, output)),
        "mae": sk.mean_absolute_error(y, output),
        "r2": sk.r2_score(y, output),
    }
    each = sk.mean_squared_error(y, output, multioutput="raw_values") ** 0.5
    expected |= {f"rmse_target_{k}": value for k, value in enumerate(each)}
    assert got == pytest.approx(expected, rel=1e-12)
    assert list(named(Regression(1))) == ["rmse", "mae", "r2"]
    assert torch.allclose(task.loss(output, y), (network - (y - task.mean) / task.std).square().mean(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_pixels(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    output = torch.randn(6, 3, 8, 8, generator=g)
    y = torch.randint(-1, 3, (6, 8, 8), generator=g)  # -1: ignored
    known = y >= 0
    labels, predicted = y[known], output.argmax(1)[known]
    got = {name: float(metric(output, y)) for name, metric in named(Segmentation(3)).items()}
    expected = {
        "miou": sk.jaccard_score(labels, predicted, average="macro"),
        "dice": sk.f1_score(labels, predicted, average="macro"),
        "accuracy": sk.accuracy_score(labels, predicted),
    }
    assert got == pytest.approx(expected)


def test_tokens() -> None:
    g = torch.Generator().manual_seed(0)
    output = torch.randn(5, 7, 11, generator=g, dtype=torch.float64)
    y = torch.randint(-1, 11, (5, 7), generator=g)
    known = y >= 0
    got = {name: float(metric(output, y)) for name, metric in named(NextToken(11)).items()}
    loss = torch.nn.functional.cross_entropy(output.movedim(2, 1), y, ignore_index=-1)
    expected = {"accuracy": sk.accuracy_score(y[known], output.argmax(2)[known]), "perplexity": math.exp(float(loss))}
    assert got == pytest.approx(expected)


def test_weights_and_smoothing_are_those_of_torch() -> None:
    output, y = logits(1, 40, 6)
    for weights, smoothing in (((), 0.1), ((1.0, 2.0, 0.5, 1.5, 0.0, 1.0), 0.0), ((1.0, 2.0, 0.5, 1.5, 0.0, 1.0), 0.2)):
        task = Classification(6, weights, smoothing)
        given = torch.tensor(weights) if weights else None
        expected = torch.nn.functional.cross_entropy(
            output, y, weight=given, label_smoothing=smoothing, reduction="none"
        )
        assert torch.allclose(task.loss(output, y), expected, atol=1e-6)


def test_losses_of_numbers_are_those_of_torch() -> None:
    output, y = torch.randn(30, 3), torch.randn(30, 3) * 3
    for name, of in (("mse", "mse_loss"), ("mae", "l1_loss"), ("huber", "huber_loss")):
        expected = getattr(torch.nn.functional, of)(output, y, reduction="none").mean(1)
        assert torch.allclose(Regression(3, loss=name).loss(output, y), expected)


def test_a_loss_of_several_labels_is_that_of_torch() -> None:
    output, y = torch.randn(30, 3), torch.randint(2, (30, 3)).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(output, y, reduction="none").mean(1)
    assert torch.allclose(MultiLabel(3).loss(output, y), expected, atol=1e-6)


def test_options_make_an_equal_task() -> None:
    tasks = [
        Classification(3, (1.0, 2.0, 3.0), 0.1, metric="auroc"),
        MultiLabel(4, metric="exact_match"),
        Regression(2, (1.0, 2.0), (3.0, 4.0), "huber", "mae"),
        Segmentation(5, metric="dice"),
        NextToken(9, metric="perplexity"),
    ]
    assert {task.name for task in tasks} == set(TASKS)
    for task in tasks:
        again = TASKS[task.name](**task.options)
        assert again.options == task.options
        assert again.metric.name == task.metric.name
        assert {n: t.tolist() for n, t in again.state_dict().items()} == {
            n: t.tolist() for n, t in task.state_dict().items()
        }


def test_r2_leaves_out_targets_that_are_constant() -> None:
    y = torch.stack([torch.arange(8.0), torch.full((8,), 3.0)], 1)
    output = y + torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    r2 = named(Regression(2))["r2"]
    assert float(r2(output, y)) == pytest.approx(sk.r2_score(y[:, 0], output[:, 0]))
    assert math.isnan(float(r2(y[:, 1:], y[:, 1:])))
