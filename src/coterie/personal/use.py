"""Predict with personal models and evaluate them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.analysis.significance import wilson
from coterie.api import DataSettings, find_data
from coterie.core.batch import TEST_BATCH
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.metrics import Metric, confusion
from coterie.data import DATASETS, Dataset, load
from coterie.data import federate as gather
from coterie.data.datasets import is_known, known_as
from coterie.data.user import is_path
from coterie.execution.scoring import measured, slices
from coterie.federation.newcomers import keep_out
from coterie.personal.arrays import SampleForm, words
from coterie.personal.labelled import BY_NAME, LabelledReading, joined, read_labelled
from coterie.personal.labels import Chance, LabelMapping
from coterie.personal.samples import Samples
from coterie.runs.config import as_tuples
from coterie.runs.stored_run import StoredRun

log = logging.getLogger(__name__)


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    """(N, ...), in the batches that a run uses for tests."""
    with torch.no_grad():
        return torch.cat([model(x[part]) for part in slices(len(x), TEST_BATCH)])


def predict(run: StoredRun, client: int | str, samples: Samples, top: int = 3) -> list[dict[str, Any]]:
    """Predict every sample with the client's model: entries of `Task.answer`, and its label if the file has labels.

    top: classes or tokens to list, the most probable first.
    """
    if top < 1:
        raise CoterieError(f"top must be at least 1, got {top}")
    model = run.personal_model(client)
    read = model.task.read(outputs_of(model, samples.x))
    return [
        {
            "sample": name,
            "client": model.client_name,
            **({"label": label} if label else {}),
            **model.task.answer(one, run.class_names, top),
        }
        for name, label, one in zip(samples.names, samples.labels, read, strict=True)
    ]


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one client's model."""

    client: int
    samples: int
    metrics: tuple[Metric, ...]  # of the task
    values: tuple[float | None, ...]  # of these metrics; None: undefined
    loss: float  # mean over samples
    confusion: Tensor | None = (
        None  # (K, K) samples of class (row) predicted as class (column), if samples have classes
    )

    @property
    def scores(self) -> dict[str, float | None]:
        """Name of a metric -> value."""
        return {metric.name: value for metric, value in zip(self.metrics, self.values, strict=True)}

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the accuracy."""
        if self.confusion is None or not self.samples:
            return None
        return wilson(int(self.confusion.diag().sum()), self.samples)

    @property
    def class_accuracy(self) -> list[float | None]:
        """None for a class without samples."""
        rows: Iterable[Tensor] = () if self.confusion is None else self.confusion
        return [share(int(row[k]), int(row.sum())) for k, row in enumerate(rows)]

    @property
    def class_f1(self) -> list[float | None]:
        """None for a class that neither occurs nor is predicted."""
        if self.confusion is None:
            return []
        right, both = self.confusion.diag(), self.confusion.sum(0) + self.confusion.sum(1)
        return [share(2 * int(a), int(b)) for a, b in zip(right, both, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        found = {"client": self.client, "samples": self.samples, **self.scores}
        found["loss"] = self.loss if self.samples else None
        if self.confusion is None:
            return found
        classes = {"interval": self.interval, "class_accuracy": self.class_accuracy, "class_f1": self.class_f1}
        return {**found, **classes, "confusion": self.confusion.tolist()}


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def evaluate(
    run: StoredRun,
    clients: Sequence[int | str],
    data: str | None = None,
    data_dir: str | None = None,
    reading: LabelledReading = BY_NAME,
) -> list[Evaluation]:
    """Evaluate the models of these clients, each on its own test samples, or all on `data`.

    data: name of a dataset, or a path to labelled samples in any form that `read_labelled` takes. The test split is
    used if there is one. Warns about models far below chance: labels may be mixed up.
    """
    numbers = [run.client_number(client) for client in clients]
    if data is None:
        own = own_data(run, data_dir).test
        return [judged(run, client, *own.client(client)) for client in numbers]
    x, y = samples_for_test(run, data, data_dir, reading)
    found = [judged(run, client, x, y) for client in numbers]
    for one in found if run.classes else ():
        assert one.confusion is not None
        start = Chance(int(one.confusion.diag().sum()), one.samples, run.classes)
        if start.below:
            whose = f"the model of client {run.client_name(one.client)}"
            log.warning("%s: %s", data, start.warning(whose, run.class_names, reading.labels))
    return found


def samples_for_test(
    run: SampleForm, data: str, data_dir: str | None = None, reading: LabelledReading = BY_NAME
) -> tuple[Tensor, Tensor]:
    """The test samples of `data`, and their labels: a dataset by name, or a path that `read_labelled` takes."""
    if not is_path(data):
        return test_split(run, data, data_dir)
    parts = read_labelled(run, data, reading)
    return joined(parts, "test" if any(part.split == "test" for part in parts) else None)


def judged(run: StoredRun, client: int, x: Tensor, y: Tensor) -> Evaluation:
    task, classes = run.task, run.classes
    model = run.personal_model(client)
    blank = torch.zeros(classes, classes, dtype=torch.int64) if classes else None
    if not len(y):
        return Evaluation(client, 0, task.metrics, (None,) * len(task.metrics), float("nan"), blank)
    output = outputs_of(model, x)
    if classes:
        blank = confusion(output, y).long()
    task = model.task
    *values, loss = measured(task, output, y, every=True)[: len(task.metrics) + 1].tolist()
    known = tuple(None if math.isnan(value) else value for value in values)
    return Evaluation(client, len(y), task.metrics, known, loss / len(y), blank)


def own_data(run: StoredRun, data_dir: str | None = None) -> FederatedData:
    """The data of the run's clients, if the dataset is available."""
    expected = run.section("data")["partition"]
    if expected is None:
        raise no_data(run)
    if run.partition is None or run.partition.hash != expected["hash"]:
        raise run.files.damaged("partition.npz", "it is not the partition that the run trained with")
    data = gather(dataset_of(run, data_dir), run.partition)
    share, seed = run.settings.new_clients, run.settings.seed
    return keep_out(data, share, seed)[0] if share else data


def dataset_of(run: StoredRun, data_dir: str | None) -> Dataset:
    """The run's dataset by name, or the user's data as the run's command located them."""
    if run.section("data")["name"] in DATASETS:
        name = run.section("data")["name"]
        return load(name, data_dir, run.shape[-1] if DATASETS[name].side else None)
    command = run.config.get("command")
    if not isinstance(command, dict) or not all(isinstance(command.get(name), str) for name in ("dataset", "cwd")):
        raise no_data(run)
    settings = {f.name: as_tuples(command[f.name]) for f in fields(DataSettings) if f.name in command}
    settings["dataset"] = str(Path(command["cwd"]) / command["dataset"])
    return find_data(DataSettings(**settings))


def no_data(run: StoredRun) -> CoterieError:
    return CoterieError(
        f"{run.folder}: the run does not keep the data that it was given; pass them with --data FILE.npz"
    )


def test_split(run: SampleForm, name: str, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """The test split of a dataset whose samples have the run's shape."""
    side = run.shape[-1] if is_known(name) and DATASETS[known_as(name)].side else None
    found = load(name, data_dir, side)
    shape = tuple(found.x_test.shape[1:])
    if run.transform.inputs:
        raise CoterieError(f"{name}: its samples are one array; those of this run have several inputs")
    if shape != run.shape:
        raise CoterieError(
            f"{name} has samples of shape {words(shape)}; the models of this run take {words(run.shape)}"
        )
    if not run.classes:
        run.task.check_labels(found.y_test, name)
        return found.x_test, found.y_test
    return found.x_test, LabelMapping().classes(np.array(found.classes)[found.y_test.numpy()], run.class_names, name)


def merged_confusion(evaluations: Sequence[Evaluation]) -> Evaluation:
    """All clients together, for what follows from the confusion matrix; every sample counts the same."""
    found = torch.stack([e.confusion for e in evaluations if e.confusion is not None]).sum(0)
    return Evaluation(-1, int(found.sum()), (), (), float("nan"), found)
