"""The result of a run, and what users do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.api.finished_run import FinishedRun, Row
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.core.names import client_name, client_number
from coterie.core.wrapper import lasting
from coterie.execution import Backend, LocalBackend
from coterie.federation.finals import PERSONAL
from coterie.federation.history import History
from coterie.federation.trained import TrainedFederation
from coterie.models.personal import PersonalModel, make_personal_model
from coterie.models.samples import ModelInfo
from coterie.runs.checkpoint_files import read_all_records
from coterie.runs.checksums import RunFiles
from coterie.runs.describe import portrait
from coterie.runs.extending import ended_of
from coterie.runs.folder import Folder
from coterie.runs.model_files import ModelFiles, client_file, client_form
from coterie.runs.tables import measures, read_finals


@dataclass(frozen=True, repr=False)
class Result(TrainedFederation, FinishedRun):
    """What a run returns: its history, the server's state, and a model for every client.

    `scores`, `metrics` and `clients` are pandas DataFrames where pandas is installed, else lists of dicts.
    `coterie.load_run` opens the folder of a finished run as a `Run`, which has the same.

    >>> import coterie
    >>> data = coterie.load_clients(num_clients=4, local_size=40, test_size=20)
    >>> result = coterie.run("fedper", data, "linear", rounds=2, progress=False)
    >>> result.history[-1].number
    2
    >>> model = result.personal_model(0)  # a torch module: raw samples in, logits out
    >>> model(data.test.client(0)[0]).shape
    torch.Size([20, 10])
    """

    config: Mapping[str, Any] | None = field(default=None, kw_only=True)  # what config.json says of the run
    folder: Path | None = field(default=None, kw_only=True)  # where the run is on disk

    @property
    def title(self) -> str:
        """The method's name."""
        return self.method.title

    @property
    def metric(self) -> MetricScale:
        """The metric of the scores: its name, its direction, and whether it is a share."""
        return self.model.task.metric.scale

    def personal_model(self, client: int | str) -> PersonalModel:
        """The model of a client, by its number or name: a torch module from raw samples to outputs of the task."""
        data = self._data()
        number = client_number(client, data.client_names, self.client_ids)
        info = ModelInfo(
            number,
            client_name(number, data.client_names, self.client_ids),
            data.class_names or tuple(map(str, range(data.classes))),
            data.shape,
            data.train.x.dtype,
            data.transform,
            data.name,
        )
        return make_personal_model(info, self.method, self.model, self.states[number], self.down(number))

    def save(self, path: str | Path) -> Path:
        """Write a run folder, with all models, that `coterie.load_run` and the commands open. Returns its path."""
        data = self._data()
        if self.config is None:
            raise CoterieError("this result does not know how it was run, so it cannot be saved; use coterie.run")
        splits = ["test", *(["validation"] if data.validation is not None else [])]
        newcomers = any(point.startswith("new_") for record in self.history for point, _ in record.scores)
        counts, rule = data.train.class_counts(data.classes), data.partition and data.partition.name
        folder = Folder(path, dict(self.config), splits, newcomers)
        try:
            picture = portrait(data.name, rule, counts, data.class_names, data.client_names)
            folder.begin(counts, data.partition, picture, self.history)
            folder.finish(self)
        except BaseException:
            folder.close()
            folder.remove()
            raise
        folder.close()
        return folder.path

    def _data_name(self) -> str | None:
        return None if self.data is None else self.data.name

    def _clients(self) -> list[Row]:
        data = self._data()
        classes = (data.train.class_counts(data.classes) > 0).sum(1).tolist()
        return [
            {
                "client": number,
                "name": client_name(number, data.client_names, self.client_ids),
                "train_samples": data.train.sizes[number],
                "test_samples": data.test.sizes[number],
                "classes": classes[number],
            }
            for number in self.client_ids
        ]

    def _finals(self) -> dict[str, dict[int, float]]:
        if self.finals is None:
            return {}
        columns = self.finals.values[PERSONAL].T.tolist()
        return {
            metric.name: dict(enumerate(values)) for metric, values in zip(self.finals.metrics, columns, strict=True)
        }

    def _undefined(self) -> str:
        if self.data is None or not self.data.classes:
            return super()._undefined()
        classes = (self.data.test.class_counts(self.data.classes) > 0).sum(1)
        if not classes.any():
            return "no client has test samples"
        return f"{super()._undefined()}{': each has test samples of one class' * bool((classes == 1).all())}"

    def _measures(self) -> list[Row]:
        return [measures(record) for record in self.history]

    def _data(self) -> FederatedData:
        if self.data is None:
            raise CoterieError("the personal models of this federation are on the devices of its clients")
        return self.data


def reloaded(path: Path, backend: Backend, privacy: Mapping[str, Any] | None, config: Mapping[str, Any]) -> Result:
    """The result as `coterie.run` returned it. backend: of the run; nothing is trained."""
    method, model = lasting(backend.method), replace(backend.model.to("cpu"), precision="fp32")
    history = History(read_all_records(path / "checkpoint"))
    history.ended = ended_of(path)
    server, files = method.server_init(model, backend.census), ModelFiles(RunFiles(path))
    states, data = backend.states.blank(), backend.data if isinstance(backend, LocalBackend) else None
    if data is not None:
        form = client_form(method, model, server, data.shape, data.train.x.dtype)
        for client in range(backend.num_clients):
            states[client] = files.filled(client_file(client, backend.num_clients - 1), form)["state"]
        states.settle()
    server = files.filled("server.safetensors", server)
    finals = read_finals(path, tuple(metric.scale for metric in model.task.metrics))
    about: dict[str, Any] = {"privacy": privacy, "finals": finals, "config": config, "folder": path}
    return Result(method, model, data, server, states, history, **about)
