"""The readable content of a run folder, without rebuilding the method, network or data."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.data.partition import DAMAGED, Partition
from coterie.federation.history import POINTS
from coterie.runs import tables
from coterie.runs.checksums import Changed, OtherFormat, RunFiles
from coterie.runs.config import metric_of, read_object
from coterie.runs.disk import Foreign, read_inside
from coterie.runs.head_weights import HeadWeights, read_head_weights

T = TypeVar("T")
# What reports read.
READ = ("config", "metrics_table", "client_table", "head_weights", "class_table", "picture", "result", "log",
        "client_metrics", "client_confusion")  # fmt: skip


class RunRecord:
    """How a run went. Every file is read and verified when it is first needed.

    `config`, `rounds`, `last_scores`, `result`, ... are empty where a file is missing or unreadable, and `missing` says
    why.
    """

    reference = ""  # the outcome that the user named to test the other runs of its comparison against

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files = RunFiles(self.folder)
        self._missing: dict[str, str] = {}  # file -> what is wrong with it

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self._optional("config.json", read_object) or {}

    @cached_property
    def result(self) -> Mapping[str, Any] | None:
        """None for a run that has not finished."""
        return self._optional("result.json", read_object, always=False)

    @cached_property
    def metric(self) -> MetricScale:
        """The metric of the scores."""
        return metric_of(self.config)

    @cached_property
    def metrics_table(self) -> tables.MetricsTable:
        return self._optional("metrics.csv", tables.read_metrics) or tables.MetricsTable()

    @cached_property
    def rounds(self) -> Mapping[int, tables.Measures]:  # round -> its row of metrics.csv
        return self.metrics_table.rounds

    @cached_property
    def client_table(self) -> tables.ClientTable:
        read = partial(tables.read_clients, metric=self.metric)
        return self._optional("clients.csv", read) or tables.ClientTable({}, {}, {})

    @cached_property
    def class_table(self) -> tables.ClassTable | None:
        return self._optional("classes.csv", tables.read_classes, always=self.section("data").get("classes") != 0)

    @cached_property
    def client_metrics(self) -> tables.ClientMetrics:
        """Every metric of every client after the last round; empty if the run did not measure them."""
        return self._optional("evaluation.csv", tables.read_client_metrics, always=False) or {}

    @cached_property
    def client_confusion(self) -> Sequence[tuple[int, int, int, int]]:
        """Client, label, prediction and test samples, of personal models after the last round."""
        return self._optional("confusion.csv", tables.read_confusion, always=False) or ()

    @cached_property
    def partition(self) -> Partition | None:
        """None if the run was given data that were partitioned already."""
        path = self.folder / "partition.npz"
        return self._optional(path.name, lambda content: Partition.read(io.BytesIO(content), path), always=False)

    @cached_property
    def head_weights(self) -> Sequence[HeadWeights]:
        groups, clients = self.partition.groups if self.partition else (), integer(self.section("data").get("clients"))
        read = lambda content: read_head_weights(content, self.client_table.trained, clients, groups)  # noqa: E731
        return self._optional("reports.npz", read, always=False) or ()

    @cached_property
    def picture(self) -> str:
        """SVG of the partition."""
        return self._optional("partition.svg", read_text, always=self.section("data").get("classes") != 0) or ""

    @cached_property
    def log(self) -> str:
        return self._optional("log.txt", read_text, always=False, verified=False) or ""

    @property
    def missing(self) -> list[str]:
        """What cannot be read, and why."""
        for name in READ:
            getattr(self, name)
        return [f"{name} {problem}" for name, problem in self._missing.items()]

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the configuration; empty if it is not there."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def title(self) -> str:
        """The method's name."""
        return str(self.section("method").get("name") or self.folder.name)

    @property
    def seed(self) -> int:
        return integer(self.section("federation").get("seed"))

    @property
    def planned(self) -> int:
        """The number of rounds that the run was started with."""
        return integer(self.section("federation").get("rounds"))

    @property
    def last_scores(self) -> Mapping[str, Sequence[tables.Score]]:
        """Point -> the test scores of clients when last measured."""
        return self.client_table.last

    @property
    def measured(self) -> list[str]:
        """Points of measurement."""
        return [point for point in POINTS if self.curve(point)]

    def curve(self, point: str, split: str = "", measure: str = "mean") -> list[tuple[float, float]]:
        """(round, score as shown: shares in percent). measure: mean over clients, worst10, ..., as in metrics.csv."""
        column = f"{split}{point}_{measure}"
        return [(number, self.metric.factor * row[column]) for number, row in self.rounds.items() if column in row]

    def total(self, start: str) -> float:
        """Sum over rounds of all columns that begin with this."""
        return sum(v for row in self.rounds.values() for column, v in row.items() if column.startswith(start))

    def _optional(self, name: str, read: Callable[[bytes], T], always: bool = True, verified: bool = True) -> T | None:
        """The file as read, or None. always: every run has it. verified: it has a checksum."""
        try:
            return read(self.files.read(name) if verified else read_inside(self.folder, name))
        except FileNotFoundError:
            if always:
                self._missing[name] = "is missing"
        except (Changed, Foreign, OtherFormat):  # never shown
            raise
        except (*DAMAGED, CoterieError, csv.Error, RecursionError) as error:
            self._missing[name] = f"cannot be read ({error})"
        return None


def read_text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def integer(value: Any) -> int:
    return value if isinstance(value, int) else 0
