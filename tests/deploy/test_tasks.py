"""Federations of devices for every task: the same as a simulation, and labels that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.api import DataSettings, run
from coterie.api.saved_run import load_run
from coterie.core import tree
from coterie.core.data import FederatedData, Split, Transform
from coterie.core.errors import CoterieError
from coterie.core.metrics import OutputMetric
from coterie.core.task import Classification, Task
from coterie.core.tasks import MultiLabel, NextToken, Regression, Segmentation
from coterie.data.task_choice import with_task
from coterie.deploy import device_data
from coterie.deploy.device_setup import DevicePolicy, exact_statistics
from coterie.deploy.handshake import hello
from coterie.deploy.membership import Membership
from coterie.deploy.messages import check_scores
from coterie.deploy.server import Service, run_federation
from coterie.deploy.task_schema import TaskSchema
from coterie.deploy.transports.flower import device as flower_device
from coterie.deploy.transports.flower.server import FlowerTransport
from coterie.deploy.wire import InvalidAnswer, Refused
from coterie.runs.stored_run import StoredRun
from tests import toy
from tests.deploy.test_nodes import SETTINGS, Fake, hurry, timeouts

__all__ = ["hurry"]
HOSTED = ("0,3", "1", "2,4")


class Ordinal(Task):
    """A task of a user's own: one number per sample, the level above zero."""

    name = "ordinal"
    label_type = torch.float32

    def __init__(self, levels: int, metric: str | None = None) -> None:
        gap = OutputMetric("gap", lambda output, y: (output - y).abs().mean(), higher=False, share=False)
        super().__init__((gap,), metric, levels=levels)
        self.levels = levels

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - y).square().mean(1)

    @property
    def width(self) -> int:
        return 1


def relabelled(task: Task, labels: Callable[[Tensor], Tensor]) -> FederatedData:
    """The toy's clients with other labels. labels: of (n,) classes."""
    data = toy.toy(augmented=False)

    def of(split: Split) -> Split:
        return replace(split, y=labels(split.y))

    return replace(
        data, classes=task.classes if task.one_class else 0, train=of(data.train), test=of(data.test), task=task
    )


def pixels(y: Tensor) -> Tensor:
    """A map with a class per pixel; some are ignored."""
    found = (y[:, None, None] + torch.arange(12)[:, None]) % 3 * torch.ones(12, dtype=torch.int64)
    return torch.where(torch.arange(12) == 5, -1, found)


def tokens() -> FederatedData:
    return replace(toy.of_task("next-token")[0], transform=Transform())


def numbers(y: Tensor) -> Tensor:
    return torch.stack([3.0 * y + 5.0, -0.5 * y - 1.0], 1)


CASES: dict[str, tuple[Callable[[], FederatedData], str]] = {
    "classification by macro F1": (
        lambda: relabelled(Classification(4, metric="macro_f1", label_smoothing=0.1), lambda y: y),
        "mlp",
    ),
    "multi-label": (lambda: relabelled(MultiLabel(2), lambda y: torch.stack([y % 2, y // 2], 1).float()), "mlp"),
    "regression": (lambda: relabelled(Regression.fitted(numbers(toy.toy().train.y), 0), numbers), "mlp"),
    "segmentation": (lambda: relabelled(Segmentation(3), pixels), "unet"),
    "next-token": (tokens, "lstm"),
    "own": (lambda: relabelled(Ordinal(4), lambda y: y[:, None].float()), "mlp"),
}


def hosted(data: Callable[[tuple[int, ...]], FederatedData]) -> Any:
    def load(clients: str, wanted: DataSettings) -> tuple[tuple[int, ...], FederatedData]:
        return device_data.numbers(clients), data(device_data.numbers(clients))

    return load


def federation(folder: Path, model: str, task: str | None = None, method: str = "ditto", **more: Any) -> Any:
    line = Fake(folder, HOSTED)
    given = {**SETTINGS, "rounds": 2, "timeouts": timeouts(), "model": model, "task": task, **more}
    return run_federation(method, Service(num_clients=5), lambda register: FlowerTransport(line, register), **given)


@pytest.mark.long
@pytest.mark.parametrize("kind", CASES)
def test_the_same_as_in_one_process(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and predictions bit for bit, scores of personal models and of the global model up to float32."""
    made, model = CASES[kind]
    data = made()
    monkeypatch.setattr(flower_device, "load_hosted_clients", hosted(data.pick))
    own = "tests.deploy.test_tasks:Ordinal" if kind == "own" else None
    length = {"rounds": 1 if model == "unet" else 2}
    served = federation(tmp_path, model, own, out=tmp_path / "served", **length)
    expected = run("ditto", data, model, backend=toy.IN_TURN, **{**SETTINGS, **length}, progress=False)
    toy.assert_same(tree.flatten({"server": expected.server}), tree.flatten({"server": served.server}))
    for a, b in zip(expected.history, served.history, strict=True):
        assert a.metric == b.metric == data.task.metric.scale
        assert {at for at, _ in b.scores} >= {"pre", "post", "global"}
        assert a.scores.keys() == b.scores.keys()
        for at, scores in a.scores.items():
            torch.testing.assert_close(tuple(b.scores[at]), tuple(scores), rtol=1e-6, atol=0, equal_nan=True)
    left = load_run(next((tmp_path / "device-0").glob("*/run")), task=Ordinal if kind == "own" else None)
    x = data.test.client(3)[0]
    with torch.no_grad():
        assert torch.equal(left.personal_model(3)(x), expected.personal_model(3)(x))
    assert StoredRun(tmp_path / "served").metric == a.metric


@pytest.mark.long
def test_devices_that_know_only_their_own_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each standardizes by its own labels, one of them a constant; the server pools mean and standard deviation."""
    whole = relabelled(Regression(2), numbers)
    whole.train.y[:, 1] = torch.where(whole.train.owners() == 1, 2.0, whole.train.y[:, 1])
    whole = with_task(replace(whole, task=Classification(4), classes=4), Regression)

    def own(ids: tuple[int, ...]) -> FederatedData:
        picked = whole.pick(ids)
        return replace(picked, task=Regression.fitted(picked.train.y, 0))

    assert TaskSchema.of(own((1,))).std[1] == 0.0
    monkeypatch.setattr(flower_device, "load_hosted_clients", hosted(own))
    served = federation(tmp_path, "mlp")
    truth = whole.train.y.double()
    torch.testing.assert_close(served.model.task.mean.double(), truth.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(served.model.task.std.double(), truth.std(0, correction=0), rtol=1e-6, atol=1e-6)
    expected = run("ditto", whole, "mlp", backend=toy.IN_TURN, **{**SETTINGS, "rounds": 2}, progress=False)
    ours, theirs = (result.history[-1].scores["global", "test"].weighted for result in (served, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def joined(*tasks: Task, own: type[Task] | None = None) -> Membership:
    members = Membership(5, task=own)
    for n, task in enumerate(tasks):
        y = (lambda y: y) if task.one_class else lambda y: y[:, None].float()
        members.add(hello(f"device-{n}", relabelled(task, y).pick((n,)), (n,)))
    return members


def test_tasks_that_differ_are_refused() -> None:
    with pytest.raises(
        Refused, match=r"device-1 trains for regression, device device-0 for classification; use the same"
    ):
        joined(Classification(4), Regression(1))
    with pytest.raises(Refused, match=r"has loss huber on device device-1 and mse on device device-0; .* --task-args"):
        joined(Regression(1), Regression(1, loss="huber"))
    with pytest.raises(Refused, match=r"has metric auroc on .* not set on .* pass the same --metric"):
        joined(Classification(4), Classification(4, metric="auroc"))
    assert joined(Regression(1, (1.0,), (2.0,)), Regression(1, (3.0,), (4.0,))).schema.task.mean != (1.0,)


def test_code_that_a_device_names_is_not_imported() -> None:
    with pytest.raises(
        Refused, match=r"task tests.deploy.test_tasks:Ordinal; install its code on this machine and name"
    ):
        joined(Ordinal(4))
    assert joined(Ordinal(4), own=Ordinal).schema.task.kind == "tests.deploy.test_tasks:Ordinal"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"options": {"targets": 10**12}}, "too large"), ({"options": {"targets": [[1]]}}, "too large, or not a plain"),
     ({"options": {"widgets": 1}}, "invalid options of the task regression"),
     ({"kind": "os:system"}, "install its code"), ({"kind": "chess"}, "unknown task"),
     ({"label_shape": (2**13, 2**13)}, "labels of shape"),
     ({"mean": (1.0, 2.0)}, "invalid mean"), ({"std": (-1.0,)}, "invalid mean"),
     ({"kind": "classification", "options": {"classes": 4}}, "0 classes, but the task is classification")],
)  # fmt: skip
def test_forged_tasks(changes: dict[str, Any], reason: str) -> None:
    data = relabelled(Regression(1, (1.0,), (2.0,)), lambda y: y[:, None].float())
    said = hello("a", data, (0, 1, 2, 3, 4))
    forged = replace(said.schema, task=replace(said.schema.task, **changes))
    with pytest.raises(Refused, match=reason):
        Membership(5).add(replace(said, schema=forged))


def test_scores_of_other_metrics() -> None:
    """A share is between 0 and 1, a count of samples is whole; NaN says that a metric is undefined."""
    share, number = (Classification(4, metric="macro_f1").metric.scale, Regression(1).metric.scale)
    check_scores("test", torch.tensor([2.5, 10.0, 0.3]), share)
    check_scores("test", torch.tensor([torch.nan, 10.0, 0.3]), share)
    check_scores("test", torch.tensor([250.0, 10.0, 0.3]), number)
    for scores, metric in (
        ([12.0, 10.0, 0.3], share),
        ([torch.inf, 10.0, 0.3], number),
        ([0.0, 1.0, torch.nan], number),
    ):
        with pytest.raises(InvalidAnswer):
            check_scores("test", torch.tensor(scores), metric)


def test_targets_are_exact_statistics(tmp_path: Path) -> None:
    """Under --dp sample, only public constants may standardize them."""
    data = relabelled(Regression(1, (1.0,), (2.0,)), lambda y: y[:, None].float())
    found = exact_statistics(DataSettings(), data, tell_classes=False)
    with pytest.raises(CoterieError, match=r"Standardizing the numbers to predict sends exact .* --task-args mean="):
        DevicePolicy(tmp_path, max_epsilon=1.0, exact=found)
    assert exact_statistics(DataSettings(task_args="mean=[1],std=[2]"), data, tell_classes=False) == ()


def test_labels_that_do_not_fit_are_refused_on_the_device() -> None:
    with pytest.raises(CoterieError, match=r"classes are 0 to 5"):
        NextToken(6).check_labels(torch.tensor([[7]]))
