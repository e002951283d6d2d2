"""Read config.json, validate it, and build the objects that it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from coterie.analysis.lookup import checked_class, method_class
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale
from coterie.core.task import Classification, Task
from coterie.core.tasks import TASKS, task_class
from coterie.core.training import LocalTraining
from coterie.core.validation import MappingReader
from coterie.methods import METHODS
from coterie.runs.checksums import RunFiles

NEEDED: dict[str, dict[str, Any]] = {
    "method": {"name": str, "class": str, "train": dict},
    "network": {"name": str | None, "head": str | None},
    "federation": {"rounds": int, "seed": int},
    "data": {
        "name": str,
        "clients": int,
        "classes": int,
        "class_names": tuple[str, ...],
        "shape": tuple[int, ...],
        "dtype": str,
        "train_sizes": tuple[int, ...],
        "test_sizes": tuple[int, ...],
        "transform": dict,
        "partition": dict | None,
    },
}
OPTIONAL = {  # of data; ids: clients of a device
    "client_names": tuple[str, ...],
    "ids": tuple[int, ...] | None,
    "label_shape": tuple[int, ...],
}


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of the run in this folder. A missing or damaged config.json is an error."""
    try:
        return read_object(RunFiles(path).read("config.json"))
    except FileNotFoundError:
        raise CoterieError(f"{path} is not a run folder: it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CoterieError(f"{path / 'config.json'} cannot be read: {error}") from None


def read_object(content: bytes) -> dict[str, Any]:
    found = json.loads(content.decode("utf-8", "replace"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def check_config(path: Path, config: Any) -> None:
    """Raise an error if something is missing, has the wrong type or contradicts the rest."""
    try:
        top = MappingReader("", config)
        parts = {part: MappingReader(f"{part}.", top.take(part, dict)) for part in NEEDED}
        needed = {
            part: {name: parts[part].take(name, kind) for name, kind in kinds.items()} for part, kinds in NEEDED.items()
        }
        data = needed["data"] | {name: parts["data"].take(name, kind, None) for name, kind in OPTIONAL.items()}
        transform = MappingReader("data.transform.", data["transform"])
        for name in ("mean", "std"):
            transform.take(name, tuple[float, ...])
        metric_of(config)
    except CoterieError as error:
        raise damaged(path, error) from None
    if not agrees(data):
        raise damaged(path, "the numbers of clients, classes and samples in data do not agree")


def metric_of(config: Mapping[str, Any]) -> MetricScale:
    """The primary metric of a run; accuracy where config.json names none."""
    section = config.get("task")
    found = section.get("metric") if isinstance(section, dict) else None
    try:
        metric = MetricScale(**found) if isinstance(found, dict) else ACCURACY_SCALE
    except TypeError as error:
        raise CoterieError(f"task.metric: {error}") from None
    if not (isinstance(metric.name, str) and all(isinstance(part, bool) for part in metric[1:])):
        raise CoterieError(f"task.metric is not a metric: {found}")
    return metric


def damaged(path: Path, why: object) -> CoterieError:
    return CoterieError(f"{path / 'config.json'} is damaged: {why}")


def agrees(data: Mapping[str, Any]) -> bool:
    """Whether the counts, names and types in the section `data` agree."""
    clients, ids, names = data["clients"], data["ids"], data["client_names"]
    whole = (*data["shape"], *data["train_sizes"], *data["test_sizes"], clients, data["classes"], *(ids or ()))
    return (
        min(whole) >= 0
        and len(data["train_sizes"]) == clients > 0
        and (ids is None or len(set(ids)) == len(ids) == clients)
        and (not data["classes"] or len(data["class_names"]) in (0, data["classes"]))
        and len(names or ()) in (0, clients)
        and isinstance(getattr(torch, data["dtype"], None), torch.dtype)
    )


def made_method(section: Mapping[str, Any], own: str | type[AnyMethod] | None = None) -> AnyMethod:
    """The method that config.json describes. own: the user's class or its import path, for one outside Coterie.

    Only a path that the user gave is imported, since config.json may come from an untrusted source.
    """
    if own is None:
        if section["class"] not in METHODS:
            raise CoterieError(f"the method '{section['class']}' is not one of Coterie's")
        own = section["class"]
    kind = method_class(own) if isinstance(own, str) else checked_class(own.__qualname__, own)
    known = {f.name for f in fields(kind)}
    settings = {name: as_tuples(value) for name, value in section.items() if name not in ("name", "class")}
    if set(settings) != known:
        differ = ", ".join(sorted(known ^ set(settings)))
        raise CoterieError(f"{section['name']} has other settings now than when the run was made: {differ}")
    return kind(**settings | {"train": LocalTraining(**section["train"])})


def made_task(section: Mapping[str, Any], classes: int, own: str | type[Task] | None = None) -> Task:
    """The task that config.json describes. classes: of a run that names no task. own: as for methods."""
    if not section:
        return Classification(classes)
    if own is None and section["class"] not in TASKS:
        raise CoterieError(f"the task '{section['class']}' is not one of Coterie's")
    kind = task_class(own) if own is not None else TASKS[section["class"]]
    try:
        return kind(**section["options"])
    except TypeError as error:
        raise CoterieError(f"task '{section['class']}' has other options than when the run was made: {error}") from None


def as_tuples(value: Any) -> Any:
    """JSON has no tuples."""
    if isinstance(value, dict):
        return {name: as_tuples(part) for name, part in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
