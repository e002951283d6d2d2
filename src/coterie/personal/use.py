"""Personal models at work: what they predict, and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.api import DataSettings, find_data
from coterie.clients.base import slices
from coterie.core.errors import CoterieError
from coterie.core.local import TEST_BATCH
from coterie.core.samples import FederatedData
from coterie.data import DATASETS, Dataset, Partition, load
from coterie.data import federate as gather
from coterie.federation.newcomers import keep_out
from coterie.personal.config import as_tuples
from coterie.personal.run import Run
from coterie.personal.samples import Samples, read_labelled, words


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """(N, K), in batches as a run measures."""
    with torch.no_grad():
        return torch.cat([model(x[part]) for part in slices(len(x), TEST_BATCH)])


def predict(run: Run, client: int, samples: Samples, top: int = 3) -> list[dict[str, Any]]:
    """For each sample its most probable classes, the first one first."""
    if top < 1:
        raise CoterieError(f"top must be at least 1, not {top}")
    sure = logits_of(run.personal_model(client), samples.x).softmax(1).topk(min(top, run.classes))
    names = run.class_names
    return [
        {
            "sample": name,
            "classes": [{"class": k, "name": names[k], "probability": p} for p, k in zip(*row, strict=True)],
        }
        for name, *row in zip(samples.names, sure.values.tolist(), sure.indices.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Evaluation:
    """How one client's model does."""

    client: int
    confusion: Tensor  # (K, K) samples of class (row) that were taken for class (column)
    loss: float  # mean cross entropy

    @property
    def samples(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float | None:
        return share(int(self.confusion.diag().sum()), self.samples)

    @property
    def class_accuracy(self) -> list[float | None]:
        """None for a class that is not among the samples."""
        return [share(int(row[k]), int(row.sum())) for k, row in enumerate(self.confusion)]

    def told(self) -> dict[str, Any]:
        return {
            "client": self.client,
            "samples": self.samples,
            "accuracy": self.accuracy,
            "loss": self.loss if self.samples else None,
            "class_accuracy": self.class_accuracy,
            "confusion": self.confusion.tolist(),
        }


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def evaluate(
    run: Run, clients: Sequence[int], data: str | None = None, data_dir: str | None = None
) -> list[Evaluation]:
    """The models of these clients, each on its own test samples; with `data`, all on the same ones.

    data: name of a dataset, of which the test split is taken, or an .npz file with x and y.
    """
    for client in clients:
        run.check_client(client)
    if data is None:
        own = own_data(run, data_dir).test
        return [judged(run, client, *own.client(client)) for client in clients]
    x, y = read_labelled(run, Path(data)) if data.endswith(".npz") else test_split(run, data, data_dir)
    return [judged(run, client, x, y) for client in clients]


def judged(run: Run, client: int, x: Tensor, y: Tensor) -> Evaluation:
    confusion = torch.zeros(run.classes, run.classes, dtype=torch.int64)
    model = run.personal_model(client)
    if not len(y):
        return Evaluation(client, confusion, float("nan"))
    logits = logits_of(model, x)
    confusion.index_put_((y, logits.argmax(1)), torch.tensor(1), accumulate=True)
    return Evaluation(client, confusion, float(F.cross_entropy(logits.double(), y)))


def own_data(run: Run, data_dir: str | None = None) -> FederatedData:
    """What the clients of the run had, where the dataset is at hand."""
    file, told = run.path / "partition.npz", run.about["partition"]
    if told is None:
        raise no_data(run)
    partition = Partition.load(file)
    if partition.hash != told["hash"]:
        raise CoterieError(f"{file}: damaged, it is not the partition that was trained with")
    data = gather(dataset_of(run, data_dir), partition)
    share, seed = run.settings.new_clients, run.settings.seed
    return keep_out(data, share, seed)[0] if share else data


def dataset_of(run: Run, data_dir: str | None) -> Dataset:
    """By its name; the user's own, as the command that began the run said where it is."""
    if run.about["name"] in DATASETS:
        return load(run.about["name"], data_dir)
    command = run.config.get("command")
    if not isinstance(command, dict) or not all(isinstance(command.get(name), str) for name in ("dataset", "cwd")):
        raise no_data(run)
    told = {f.name: as_tuples(command[f.name]) for f in fields(DataSettings) if f.name in command}
    told["dataset"] = str(Path(command["cwd"]) / command["dataset"])
    return find_data(DataSettings(**told))


def no_data(run: Run) -> CoterieError:
    return CoterieError(
        f"{run.path}: the run was given data of its own, which it does not keep; name them with --data FILE.npz"
    )


def test_split(run: Run, name: str, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """Of a dataset that could be that of the run."""
    found = load(name, data_dir)
    shape = tuple(found.x_test.shape[1:])
    if shape != run.shape:
        raise CoterieError(f"{name} has samples of {words(shape)}; the models of this run take {words(run.shape)}")
    if len(found.classes) > run.classes:
        raise CoterieError(f"{name} has {len(found.classes)} classes; the models of this run know {run.classes}")
    return found.x_test, found.y_test


def together(evaluations: Sequence[Evaluation]) -> Evaluation:
    """All clients as one; every sample counts the same."""
    tested = [e for e in evaluations if e.samples]
    total = max(sum(e.samples for e in tested), 1)
    confusion = torch.stack([e.confusion for e in evaluations]).sum(0)
    return Evaluation(-1, confusion, sum(e.loss * e.samples for e in tested) / total)
