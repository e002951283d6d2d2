"""The result of a run, and what users do with it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.analysis.plots import draw_curves
from coterie.analysis.tables import frame
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.core.names import client_name, client_number
from coterie.core.wrapper import lasting
from coterie.execution import Backend, LocalBackend
from coterie.federation.finals import PERSONAL
from coterie.federation.history import POINTS, History, clients_text
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {"pre": "personal model", "post": "after local training", "global": "global model"}
DO_NEXT = ".scores  .metrics  .clients  .personal_model(client)  .plot()  .report(path)  .save(path)"


@dataclass(frozen=True, repr=False)
class Result(TrainedFederation):
    """What a run returns: its history, the server's state, and a model for every client.

    `scores`, `metrics` and `clients` are pandas DataFrames where pandas is installed, else lists of dicts.

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
    def metric(self) -> MetricScale:
        """The metric of the scores: its name, its direction, and whether it is a share."""
        return self.model.task.metric.scale

    @property
    def scores(self) -> Any:
        """Mean test score over clients for every measured round, one column per point of measurement.

        Scores are of `metric`, such as accuracy (0 to 1).

        `pre`: personal models as downloaded; `post`: after local training; `global`: the server's model;
        `finished`: after the method's final step. `validation_...`: the same on validation samples.
        """
        rows: dict[int, dict[str, Any]] = {}
        for record in self.history:
            for point, split in record.scores:
                column = point if split == "test" else f"{split}_{point}"
                row = rows.setdefault(record.number, {"round": record.number})
                row[column] = record.score(point, split)
        return frame(list(rows.values()))

    @property
    def metrics(self) -> Any:
        """One row per round: participants, bytes, seconds and all measured numbers, as in metrics.csv."""
        return frame([measures(record) for record in self.history])

    @property
    def clients(self) -> Any:
        """One row per client: number, name, samples, classes, last score for each reported result, every metric."""
        data = self._data()
        classes = (data.train.class_counts(data.classes) > 0).sum(1).tolist()
        rows = [
            {
                "client": number,
                "name": client_name(number, data.client_names, self.client_ids),
                "train_samples": data.train.sizes[number],
                "test_samples": data.test.sizes[number],
                "classes": classes[number],
            }
            for number in self.client_ids
        ]
        for name, point in self.method.results.items():
            measured = list(self.history.with_point(point))
            if not measured or point.startswith("new_"):
                continue
            scores = measured[-1].scores[point, "test"]
            known = {int(c): float(a) for c, a, n in zip(scores.clients, scores.value, scores.total, strict=True) if n}
            for row in rows:
                row[name] = known.get(row["client"])
        if self.finals:
            for at, metric in enumerate(self.finals.metrics):
                for row, value in zip(rows, self.finals.values[PERSONAL][:, at].tolist(), strict=True):
                    row[metric.name] = None if math.isnan(value) else value
        return frame(rows)

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

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the mean test score over rounds. Needs matplotlib (`pip install 'coterie[plot]'`).

        ax: axes to draw into; default: a new figure. Returns the axes.
        """
        curves = {label: [curve] for point, label in CURVES.items() if (curve := self.history.curve(point))}
        if self.method.personal_is_global:
            curves.pop(CURVES["pre"], None)
        return draw_curves(curves, f"{self.method.title}{self._on()}", ax, self.metric)

    def report(self, path: str | Path) -> Path:
        """Write a report of this run: one HTML file that works offline. Returns its path."""
        from coterie.report.page import write_report

        if self.folder is not None:
            return write_report([self.folder], path)
        with tempfile.TemporaryDirectory() as parent:
            return write_report([self.save(Path(parent) / "run")], path)

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

    def __repr__(self) -> str:
        return "\n".join([self._headline(), *(f"  {name}: {text}" for name, text in self._lines()), f"  {DO_NEXT}"])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._lines())
        return f"<p><b>{escape(self._headline())}</b></p><table>{rows}</table><p><code>{escape(DO_NEXT)}</code></p>"

    def _headline(self) -> str:
        rounds = self.ended.round if self.ended else len(self.history)
        stopped = " (interrupted)" if self.ended and self.ended.reason == "interrupted" else ""
        clients = f", {clients_text(len(self.client_ids))}" if self.data is not None else ""
        return (
            f"Result of {self.method.title}{self._on()}{clients}, {rounds} round{'' if rounds == 1 else 's'}{stopped}"
        )

    def _lines(self) -> list[tuple[str, str]]:
        lines = [
            (
                o.name,
                f"{self.metric.text(o.last.mean)} mean {self.metric.words}, {self.metric.text(o.last.worst10)} worst "
                f"tenth of clients ({POINTS[o.point]})",
            )
            for o in self.outcomes()
        ]
        if self.privacy:
            lines.append(("privacy", f"ε = {self.privacy['epsilon']:.4g} at δ = {self.privacy['delta']:g}"))
        megabytes = sum(record.bytes_up + record.bytes_down for record in self.history) / 1e6
        seconds = sum(sum(record.seconds.values()) for record in self.history)
        return [*lines, ("cost", f"{megabytes:.1f} MB sent, {seconds:.1f} s of computing")]

    def _on(self) -> str:
        return f" on {self.data.name}" if self.data is not None else ""

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
