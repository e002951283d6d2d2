"""What users do with a run that has ended, whether it is in memory or in its folder."""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.analysis.plots import draw_curves
from coterie.analysis.tables import frame
from coterie.core.metric_scale import MetricScale
from coterie.federation.history import POINTS, History, Outcome, clients_text
from coterie.models.personal import PersonalModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {"pre": "personal model", "post": "after local training", "global": "global model"}
DO_NEXT = ".scores  .metrics  .clients  .personal_model(client)  .plot()  .report(path)  .save(path)"

Row = dict[str, Any]


class FinishedRun(ABC):
    """What `Result` and `Run` have in common: tables, a plot, a report and text."""

    if TYPE_CHECKING:  # fields of a dataclass in one, read from files in the other

        @property
        def history(self) -> History: ...
        @property
        def privacy(self) -> Mapping[str, Any] | None: ...
        @property
        def folder(self) -> Path | None: ...

    @property
    @abstractmethod
    def metric(self) -> MetricScale:
        """The metric of the scores: its name, its direction, and whether it is a share."""

    @property
    @abstractmethod
    def client_ids(self) -> Sequence[int]:
        """Ids of the clients whose models are here."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The method's name."""

    @abstractmethod
    def outcomes(self) -> list[Outcome]:
        """The results that the method reports."""

    @abstractmethod
    def personal_model(self, client: int | str) -> PersonalModel:
        """The model of a client, by its number or name: a torch module from raw samples to outputs of the task."""

    @abstractmethod
    def save(self, path: str | Path) -> Path:
        """Write a run folder, with all models, that `coterie.load_run` and the commands open. Returns its path."""

    @abstractmethod
    def _data_name(self) -> str | None:
        """None for a federation of devices, whose data are not here."""

    @abstractmethod
    def _clients(self) -> Sequence[Row]:
        """Number, name, samples and classes of each client."""

    @abstractmethod
    def _finals(self) -> Mapping[str, Mapping[int, float]]:
        """Every metric of the personal models after the last round: name -> client -> value."""

    @abstractmethod
    def _measures(self) -> Sequence[Row]:
        """The rows of metrics.csv, without empty cells."""

    @property
    def scores(self) -> Any:
        """Mean test score over clients for every measured round, one column per point of measurement.

        Scores are of `metric`, such as accuracy (0 to 1).

        `pre`: personal models as downloaded; `post`: after local training; `global`: the server's model;
        `finished`: after the method's final step. `validation_...`: the same on validation samples.
        """
        rows: dict[int, Row] = {}
        for record in self.history:
            for split, before in (("test", ""), ("validation", "validation_")):
                for point in POINTS:
                    if (point, split) in record.scores:
                        row = rows.setdefault(record.number, {"round": record.number})
                        row[f"{before}{point}"] = record.score(point, split)
        return frame(list(rows.values()))

    @property
    def metrics(self) -> Any:
        """One row per round: participants, bytes, seconds and all measured numbers, as in metrics.csv."""
        return frame(self._measures())

    @property
    def clients(self) -> Any:
        """One row per client: number, name, samples, classes, last score for each reported result, every metric."""
        rows = [dict(row) for row in self._clients()]
        for outcome in self.outcomes():
            if outcome.point.startswith("new_"):
                continue
            scores = list(self.history.with_point(outcome.point))[-1].scores[outcome.point, "test"]
            known = {int(c): float(a) for c, a, n in zip(scores.clients, scores.value, scores.total, strict=True) if n}
            for row in rows:
                row[outcome.name] = known.get(row["client"], math.nan)
        for name, values in self._finals().items():
            for row in rows:
                row[name] = values.get(row["client"], math.nan)
        return frame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the mean test score over rounds. Needs matplotlib (`pip install 'coterie[plot]'`).

        ax: axes to draw into; default: a new figure. Returns the axes.
        """
        curves = {point: curve for point in CURVES if (curve := self.history.curve(point))}
        if curves.get("pre") == curves.get("global"):  # every client has the server's model
            curves.pop("pre", None)
        lines = {CURVES[point]: [curve] for point, curve in curves.items()}
        return draw_curves(lines, f"{self.title}{self._on()}", ax, self.metric)

    def report(self, path: str | Path) -> Path:
        """Write a report of this run: one HTML file that works offline. Returns its path."""
        from coterie.report.page import write_report

        if self.folder is not None:
            return write_report([self.folder], path)
        with tempfile.TemporaryDirectory() as parent:
            return write_report([self.save(Path(parent) / "run")], path)

    def __repr__(self) -> str:
        return "\n".join([self._headline(), *(f"  {name}: {text}" for name, text in self._lines()), f"  {DO_NEXT}"])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._lines())
        return f"<p><b>{escape(self._headline())}</b></p><table>{rows}</table><p><code>{escape(DO_NEXT)}</code></p>"

    def _headline(self) -> str:
        ended = self.history.ended
        rounds = ended.round if ended else len(self.history)
        stopped = " (interrupted)" if ended and ended.reason == "interrupted" else ""
        clients = f", {clients_text(len(self.client_ids))}" if self._data_name() is not None else ""
        return (
            f"{type(self).__name__} of {self.title}{self._on()}{clients}, {rounds} round{'' if rounds == 1 else 's'}"
            f"{stopped}"
        )

    def _lines(self) -> list[tuple[str, str]]:
        lines = [(o.name, self._score(o)) for o in self.outcomes()]
        if self.privacy:
            lines.append(("privacy", f"ε = {self.privacy['epsilon']:.4g} at δ = {self.privacy['delta']:g}"))
        megabytes = sum(record.bytes_up + record.bytes_down for record in self.history) / 1e6
        seconds = sum(sum(record.seconds.values()) for record in self.history)
        lines.append(("cost", f"{megabytes:.1f} MB sent, {seconds:.1f} s of computing"))
        return [*lines, ("folder", str(self.folder))] if self.folder is not None else lines

    def _score(self, outcome: Outcome) -> str:
        """The mean over clients and the worst tenth, or why there is none."""
        metric, last = self.metric, outcome.last
        if math.isnan(last.mean):
            return self._undefined()
        worst = f"{metric.text(last.worst10)} worst tenth of clients"
        return f"{metric.text(last.mean)} mean {metric.words}, {worst} ({POINTS[outcome.point]})"

    def _undefined(self) -> str:
        """What to say of a metric that no client defines."""
        return f"{self.metric.words} is undefined for all clients"

    def _on(self) -> str:
        name = self._data_name()
        return f" on {name}" if name is not None else ""
