"""A run, read from its folder. The dataset is not needed."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from coterie.analysis.significance import wilson
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model
from coterie.core.names import client_name, client_number
from coterie.data.partition import DAMAGED, Partition
from coterie.federation import History, Settings
from coterie.federation.history import POINTS
from coterie.models.personal import PersonalModel, make_personal_model
from coterie.models.samples import ModelInfo
from coterie.runs import tables
from coterie.runs.checksums import Changed, OtherFormat, RunFiles
from coterie.runs.config import as_tuples, read_object
from coterie.runs.disk import Foreign, read_inside
from coterie.runs.head_weights import HeadWeights, read_head_weights
from coterie.runs.model_files import Client, ModelFiles, client_file, client_form
from coterie.runs.rebuilding import rebuilt_method, rebuilt_model

T = TypeVar("T")
# What reports read.
READ = ("config", "metrics_table", "client_table", "head_weights", "class_table", "picture", "result", "log")
KEPT_AT = ("finished", "kept", "pre", "new_post")  # where the models that a run keeps are measured: the first found


class Run:
    """A run folder. Every file is read and verified when it is first needed.

    Any folder shows how its run went: `config`, `rounds`, `scores`, `result`, ... are empty where a file is missing or
    unreadable, and `missing` says why. The rest (`method`, `history`, `clients`, `personal_model`, ...) is for finished
    runs and raises errors that name the file.
    """

    reference = ""  # the outcome that the other runs of its comparison were tested against

    def __init__(
        self,
        path: str | Path,
        model: str | nn.Module | None = None,
        trust_code: bool = False,
        method: str | type[AnyMethod] | None = None,
    ) -> None:
        self.path, self.own_model, self.trust_code, self.own_method = Path(path), model, trust_code, method
        self.files = RunFiles(self.path)
        self.model_files = ModelFiles(self.files)
        self._missing: dict[str, str] = {}  # file -> what is wrong with it

    # What the folder says, as far as it can be read.

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self._optional("config.json", read_object) or {}

    @cached_property
    def result(self) -> Mapping[str, Any] | None:
        """None for a run that has not finished."""
        return self._optional("result.json", read_object, always=False)

    @cached_property
    def metrics_table(self) -> tables.MetricsTable:
        return self._optional("metrics.csv", tables.read_metrics) or tables.MetricsTable()

    @cached_property
    def rounds(self) -> Mapping[int, tables.Measures]:  # round -> its row of metrics.csv
        return self.metrics_table.rounds

    @cached_property
    def client_table(self) -> tables.ClientTable:
        return self._optional("clients.csv", tables.read_clients) or tables.ClientTable({}, {}, {})

    @cached_property
    def class_table(self) -> tables.ClassTable | None:
        return self._optional("classes.csv", tables.read_classes)

    @cached_property
    def partition(self) -> Partition | None:
        """None if the run was given data that were partitioned already."""
        path = self.path / "partition.npz"
        return self._optional(path.name, lambda content: Partition.read(io.BytesIO(content), path), always=False)

    @cached_property
    def head_weights(self) -> Sequence[HeadWeights]:
        groups, clients = self.partition.groups if self.partition else (), integer(self.section("data").get("clients"))
        read = lambda content: read_head_weights(content, self.client_table.trained, clients, groups)  # noqa: E731
        return self._optional("reports.npz", read, always=False) or ()

    @cached_property
    def picture(self) -> str:
        """SVG of the partition."""
        return self._optional("partition.svg", read_text) or ""

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
        return str(self.section("method").get("name") or self.path.name)

    @property
    def seed(self) -> int:
        return integer(self.section("federation").get("seed"))

    @property
    def planned(self) -> int:
        """The number of rounds that the run was started with."""
        return integer(self.section("federation").get("rounds"))

    @property
    def scores(self) -> Mapping[str, Sequence[tables.Score]]:
        """Point -> the test scores of clients when last measured."""
        return self.client_table.last

    @property
    def measured(self) -> list[str]:
        """Points of measurement."""
        return [point for point in POINTS if self.curve(point)]

    def curve(self, point: str, split: str = "", measure: str = "mean") -> list[tuple[float, float]]:
        """(round, accuracy in percent). measure: mean over clients, worst10, ..., as in the columns of metrics.csv."""
        column = f"{split}{point}_{measure}"
        return [(number, 100 * row[column]) for number, row in self.rounds.items() if column in row]

    def total(self, start: str) -> float:
        """Sum over rounds of all columns that begin with this."""
        return sum(v for row in self.rounds.values() for column, v in row.items() if column.startswith(start))

    # Clients and data.

    @property
    def numbers(self) -> Sequence[int]:
        """The clients of this folder; that of a device has a few clients of a federation."""
        data, ids = self.section("data"), self.section("data").get("ids")
        return ids if isinstance(ids, list) and ids else range(integer(data.get("clients")))

    @property
    def client_names(self) -> tuple[str, ...]:
        """In the order of `numbers`; empty if clients have no names."""
        names = self.section("data").get("client_names")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def client_number(self, client: int | str) -> int:
        """The number of a client, given by its number or name."""
        try:
            return client_number(client, self.client_names, self.numbers)
        except CoterieError as error:
            raise CoterieError(f"{self.path}: {error}") from None

    def client_name(self, number: int) -> str:
        """The client's name, or its number if clients have no names."""
        return client_name(number, self.client_names, self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one raw sample."""
        return tuple(self.section("data")["shape"])

    @property
    def dtype(self) -> torch.dtype:
        """Of raw samples."""
        dtype: torch.dtype = getattr(torch, self.section("data")["dtype"])
        return dtype

    @cached_property
    def transform(self) -> Transform:
        """From raw samples to the input of the network; for tables it has the columns."""
        with self.files.parsing("config.json"):
            return Transform.from_json(self.section("data")["transform"])

    @property
    def classes(self) -> int:
        return int(self.section("data")["classes"])

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.section("data")["class_names"]) or tuple(map(str, range(self.classes)))

    @cached_property
    def census(self) -> Census:
        with self.files.parsing("classes.csv"):
            counts = tables.read_classes(self.files.read("classes.csv")).counts
            if len(counts) != len(self.numbers):
                raise ValueError(f"{len(counts)} rows for {len(self.numbers)} clients")
        return Census(torch.tensor(self.section("data")["train_sizes"]), torch.from_numpy(counts))

    # Finished runs: what happened, and the models.

    @cached_property
    def method(self) -> AnyMethod:
        return rebuilt_method(self)

    @cached_property
    def settings(self) -> Settings:
        with self.files.parsing("config.json"):
            return Settings(**{name: as_tuples(value) for name, value in self.section("federation").items()})

    @cached_property
    def model(self) -> Model:
        """The network with the weights that all clients started from."""
        return rebuilt_model(self)

    @cached_property
    def server(self) -> Any:
        """The server's state after the last round."""
        return self.model_files.filled("server.safetensors", self.method.server_init(self.model, self.census))

    @cached_property
    def history(self) -> History:
        metrics = self.metrics_table
        if problem := self._missing.get("metrics.csv"):
            raise self.files.damaged("metrics.csv", problem)
        with self.files.parsing("clients.csv"):
            return tables.read_history(metrics, self.files.read("clients.csv"), self.settings, len(self.numbers))

    @cached_property
    def clients(self) -> tuple[Client, ...]:
        """All clients that have a model here."""
        measured = {score.client: score for score in self.scores.get(self.point or "", ())}
        return tuple(
            self._client(number, int(samples), int((counts > 0).sum()), measured.get(number))
            for number, samples, counts in zip(self.numbers, *self.census, strict=True)
        )

    def _client(self, number: int, samples: int, classes: int, score: tables.Score | None) -> Client:
        correct, total = (score.correct, score.total) if score else (0, 0)
        accuracy, interval = (correct / total, wilson(correct, total)) if total else (None, None)
        file = client_file(number, max(self.numbers))
        about = (number, self.client_name(number), samples, classes, accuracy, total, interval)
        return Client(*about, self.path / "models" / file, self.model_files.size(file))

    @cached_property
    def point(self) -> str | None:
        """Where the models that the run keeps were measured; None if they were not."""
        return next((point for point in KEPT_AT if any(self.history.with_point(point))), None)

    def personal_model(self, client: int | str) -> PersonalModel:
        """A client's model, by number or name: a module from raw samples to logits."""
        number = self.client_number(client)
        name = client_file(number, max(self.numbers))
        found = self.model_files.filled(name, self._form)
        with self.files.parsing(f"models/{name}"):
            return make_personal_model(self.info(number), self.method, self.model, **found)

    def info(self, number: int) -> ModelInfo:
        """What is known of this client's model without reading it."""
        about = (self.shape, self.dtype, self.transform, self.section("data")["name"])
        return ModelInfo(number, self.client_name(number), self.class_names, *about)

    @cached_property
    def _form(self) -> Any:
        server = self.method.server_init(self.model, self.census)
        return client_form(self.method, self.model, server, self.shape, self.dtype)

    def _optional(self, name: str, read: Callable[[bytes], T], always: bool = True, verified: bool = True) -> T | None:
        """The file as read, or None. always: every run has it. verified: it has a checksum."""
        try:
            return read(self.files.read(name) if verified else read_inside(self.path, name))
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
