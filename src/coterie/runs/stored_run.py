"""A run folder with its method, network and models, which are rebuilt from it. The dataset is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.analysis.significance import wilson
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model
from coterie.core.names import client_name, client_number
from coterie.core.packing import width
from coterie.core.task import Task
from coterie.federation import Ended, History, Settings, Summary
from coterie.federation.history import POINTS, Outcome
from coterie.models.personal import PersonalModel, make_personal_model
from coterie.models.samples import ModelInfo
from coterie.runs import tables
from coterie.runs.config import as_tuples
from coterie.runs.model_files import Client, ModelFiles, client_file, client_form
from coterie.runs.rebuilding import rebuilt_method, rebuilt_model, rebuilt_task
from coterie.runs.record import RunRecord, integer

KEPT_AT = ("finished", "kept", "pre", "new_post")  # where the models that a run keeps are measured: the first found


class StoredRun(RunRecord):
    """A run folder.

    Any folder shows how its run went, as far as its files can be read: `config`, `rounds`, `last_scores`, `result`, ...
    The rest (`method`, `history`, `members`, `personal_model`, ...) is for finished runs and raises errors that name
    the file.
    """

    def __init__(
        self,
        folder: str | Path,
        model: str | nn.Module | None = None,
        trust_code: bool = False,
        method: str | type[AnyMethod] | None = None,
        task: str | type[Task] | None = None,
    ) -> None:
        super().__init__(folder)
        self.own_model, self.trust_code, self.own_method, self.own_task = model, trust_code, method, task
        self.model_files = ModelFiles(self.files)

    # Clients and data.

    @property
    def client_ids(self) -> Sequence[int]:
        """The clients of this folder; that of a device has a few clients of a federation."""
        data, ids = self.section("data"), self.section("data").get("ids")
        return ids if isinstance(ids, list) and ids else range(integer(data.get("clients")))

    @property
    def client_names(self) -> tuple[str, ...]:
        """In the order of `client_ids`; empty if clients have no names."""
        names = self.section("data").get("client_names")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def client_number(self, client: int | str) -> int:
        """The number of a client, given by its number or name."""
        try:
            return client_number(client, self.client_names, self.client_ids)
        except CoterieError as error:
            raise CoterieError(f"{self.folder}: {error}") from None

    def client_name(self, number: int) -> str:
        """The client's name, or its number if clients have no names."""
        return client_name(number, self.client_names, self.client_ids)

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
            found = Transform.from_json(self.section("data")["transform"])
            if found.inputs and (width(found.inputs),) != self.shape:
                raise ValueError("the inputs of a sample do not agree with its shape")
            return found

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of one label."""
        return tuple(self.section("data").get("label_shape", ()))

    @property
    def classes(self) -> int:
        """K, if every sample has one class; otherwise 0."""
        return int(self.section("data")["classes"])

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.section("data")["class_names"]) or tuple(map(str, range(self.classes)))

    @cached_property
    def census(self) -> Census:
        sizes = torch.tensor(self.section("data")["train_sizes"])
        if not self.classes:
            return Census(sizes, torch.zeros(len(sizes), 0, dtype=torch.int64))
        with self.files.parsing("classes.csv"):
            counts = tables.read_classes(self.files.read("classes.csv")).counts
            if len(counts) != len(self.client_ids):
                raise ValueError(f"{len(counts)} rows for {len(self.client_ids)} clients")
        return Census(sizes, torch.from_numpy(counts))

    # Finished runs: what happened, and the models.

    @cached_property
    def method(self) -> AnyMethod:
        return rebuilt_method(self)

    @cached_property
    def settings(self) -> Settings:
        with self.files.parsing("config.json"):
            return Settings(**{name: as_tuples(value) for name, value in self.section("federation").items()})

    @cached_property
    def task(self) -> Task:
        return rebuilt_task(self)

    @cached_property
    def model(self) -> Model:
        """The network with the weights that all clients started from."""
        return rebuilt_model(self)

    @cached_property
    def server(self) -> Any:
        """The server's state after the last round."""
        return self.model_files.filled("server.safetensors", self.method.server_init(self.model, self.census))

    @cached_property
    def ended(self) -> Ended | None:
        """Why the run ended, and after which round; None for a device, which does not know."""
        with self.files.parsing("result.json"):
            found = (self.result or {})["ended"]
            return found and Ended(*found.values())

    @property
    def privacy(self) -> Mapping[str, Any] | None:
        """ε, δ and what they protect; None: no noise."""
        return (self.result or {}).get("privacy")

    def outcomes(self) -> list[Outcome]:
        """The results that the method reported."""
        points = {text: point for point, text in POINTS.items()}
        with self.files.parsing("result.json"):
            return [
                Outcome(
                    found["name"],
                    points[found["measured"]],
                    Summary(**{name: number(value) for name, value in found["last"].items()}),
                    number(found["best_on_test"]),
                    found["best_by_validation"],
                )
                for found in (self.result or {})["outcomes"]
            ]

    @cached_property
    def history(self) -> History:
        metrics = self.metrics_table
        if problem := self._missing.get("metrics.csv"):
            raise self.files.damaged("metrics.csv", problem)
        with self.files.parsing("clients.csv"):
            content = self.files.read("clients.csv")
            found = tables.read_history(metrics, content, self.settings, len(self.client_ids), self.metric)
        found.ended = self.ended
        return found

    @cached_property
    def members(self) -> tuple[Client, ...]:
        """All clients that have a model here."""
        measured = {score.client: score for score in self.last_scores.get(self.point or "", ())}
        return tuple(
            self._client(number, int(samples), int((counts > 0).sum()), measured.get(number))
            for number, samples, counts in zip(self.client_ids, *self.census, strict=True)
        )

    def _client(self, number: int, samples: int, classes: int, score: tables.Score | None) -> Client:
        interval = wilson(score.correct, score.total) if score and score.correct is not None else None
        file = client_file(number, max(self.client_ids))
        about = (number, self.client_name(number), samples, classes)
        tested = (score.value if score else None, score.total if score else 0, interval)
        return Client(*about, *tested, self.folder / "models" / file, self.model_files.size(file))

    @cached_property
    def point(self) -> str | None:
        """Where the models that the run keeps were measured; None if they were not."""
        return next((point for point in KEPT_AT if any(self.history.with_point(point))), None)

    def personal_model(self, client: int | str) -> PersonalModel:
        """A client's model, by number or name: a module from raw samples to logits."""
        number = self.client_number(client)
        name = client_file(number, max(self.client_ids))
        found = self.model_files.filled(name, self._form)
        with self.files.parsing(f"models/{name}"):
            return make_personal_model(self.info(number), self.method, self.model, **found)

    def info(self, number: int) -> ModelInfo:
        """The description of this client's model, without reading its weights."""
        about = (self.shape, self.dtype, self.transform, self.section("data")["name"])
        return ModelInfo(number, self.client_name(number), self.class_names, *about)

    @cached_property
    def _form(self) -> Any:
        server = self.method.server_init(self.model, self.census)
        return client_form(self.method, self.model, server, self.shape, self.dtype)


def number(value: float | None) -> float:
    """JSON lacks NaN."""
    return math.nan if value is None else value
