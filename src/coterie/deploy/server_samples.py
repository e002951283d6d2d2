"""Test samples on the server: the global model is evaluated on them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.core import random
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.rehearsal import known_classes
from coterie.core.task import Task
from coterie.deploy.handshake import SampleSchema
from coterie.execution.looped import channels_last
from coterie.execution.requests import Request, act
from coterie.execution.scoring import SERVER, Scores, weighed
from coterie.personal.labelled import LabelledReading
from coterie.personal.use import samples_for_test


@dataclass(frozen=True)
class FederationForm:
    """The form of the samples of a federation: what `samples_for_test` needs to read more of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    transform: Transform
    label_shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...]
    task: Task


@dataclass(frozen=True)
class ServerTest:
    x: Tensor  # (N, ...) raw
    y: Tensor

    def score(self, method: AnyMethod, model: Model, server: Any) -> Scores:
        """Of the global model."""
        key, rate = random.seed_key(0), torch.ones((), dtype=model.mean.dtype)
        data = Data(self.x, self.y, key, rate, known_classes(model), Transform(), alone=True)
        found = act(method, model, Request("score_global", "test", shared=server), data, (), ())
        total = torch.tensor([len(self.y)])
        weighted, loss = weighed(model.task, found[None], total)
        return Scores(torch.tensor([SERVER]), weighted, total, loss)


def load_server_test(data: str, reading: LabelledReading, schema: SampleSchema, model: Model) -> ServerTest:
    """The test samples in `data`: the name of a dataset, or a path."""
    names = schema.class_names or tuple(map(str, range(schema.classes)))
    form = FederationForm(*schema.raw_sample, schema.transform, model.label, schema.classes, names, model.task)
    x, y = samples_for_test(form, data, None, reading)
    if not len(y):
        raise CoterieError(f"--test {data}: there are no test samples; give a file with samples, or omit --test")
    return ServerTest(channels_last(x), y)
