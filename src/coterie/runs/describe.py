"""Describe a run for config.json and result.json: data, method, model, machine and outcomes."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from coterie.analysis.lookup import described
from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.task import Task
from coterie.core.tasks import TASKS
from coterie.core.version import VERSION
from coterie.core.wrapper import innermost
from coterie.data import describe_input, picture
from coterie.execution import Backend, LocalBackend
from coterie.federation import Settings
from coterie.federation.history import POINTS, worst_tenth
from coterie.federation.trained import TrainedFederation
from coterie.runs.checkpoint_files import checksum
from coterie.runs.tables import PHASES


def describe(
    backend: Backend, newcomers: LocalBackend | None, settings: Settings, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of config.json, enough to repeat the run. config: sections to add or replace."""
    method, model, cuda = innermost(backend.method), backend.model, backend.device.type == "cuda"
    about: dict[str, Any] = {
        "method": described(method),
        "model": {
            "encoder": str(model.encoder),
            "head": str(model.head),
            "head_name": model.head_name,
            "parameters": numbers(model.start),
            "encoder_parameters": numbers(model.start.encoder),
            "head_parameters": numbers(model.start.head),
            "frozen_parameters": numbers(model.frozen),
            "start": checksum(model.initial, {}),
        },
        "task": described_task(model.task),
        "federation": asdict(settings),
        "ran": {
            "backend": type(backend).__name__,
            "device": backend.device.type,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "coterie": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        },
    }
    if isinstance(backend, LocalBackend):
        about["data"] = facts(backend.data) | {"new_content": newcomers and fingerprint(newcomers.data)}
    return {**about, **config}


def described_task(task: Task) -> dict[str, Any]:
    """The section `task` of config.json, from which an equal task is made."""
    kind = type(task)
    return {
        "class": task.name if TASKS.get(task.name) is kind else f"{kind.__module__}:{kind.__qualname__}",
        "options": task.options,
        "metric": task.metric.scale._asdict(),
    }


def numbers(weights: object) -> int:
    """The number of elements in a tree."""
    return sum(t.numel() for t in tree.leaves(weights))


def facts(data: FederatedData) -> dict[str, Any]:
    """The section `data` of config.json."""
    partition = data.partition
    return {
        "name": data.name,
        "clients": data.num_clients,
        "classes": data.classes,
        "class_names": list(data.class_names),
        "client_names": list(data.client_names),
        "shape": list(data.shape),
        "label_shape": list(data.label_shape),
        "dtype": str(data.train.x.dtype).removeprefix("torch."),
        "train_sizes": list(data.train.sizes),
        "test_sizes": list(data.test.sizes),
        "content": fingerprint(data),
        "input": describe_input(data),
        "transform": asdict(data.transform),
        "partition": partition and {"name": partition.name, "hash": partition.hash, **partition.settings},
    }


def fingerprint(data: FederatedData) -> str:
    """SHA-256 of all samples and their owners."""
    held = {name: split for name in ("train", "test", "validation") if (split := getattr(data, name)) is not None}
    sizes = {name: list(split.sizes) for name, split in held.items()}
    return checksum({f"{name}.{part}": getattr(split, part) for name, split in held.items() for part in "xy"}, sizes)


def portrait(
    name: str, rule: str | None, counts: Tensor, names: Sequence[str], client_names: Sequence[str] = ()
) -> str:
    """An SVG of the class counts (m, K) of the clients; empty without classes."""
    if not counts.shape[1]:
        return ""
    title = f"{name}{f', {rule}' if rule else ''}: {len(counts)} clients, {int(counts.sum())} training samples"
    return picture(title, counts.numpy(), tuple(names) or tuple(map(str, range(counts.shape[1]))), client_names)


def number(value: float | None) -> float | None:
    """None for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def summarise(result: TrainedFederation) -> dict[str, Any]:
    """The content of result.json; shares in 0..1."""
    finals = result.finals
    return {
        "method": result.method.title,
        "metric": result.model.task.metric.name,
        "outcomes": [
            {
                "name": o.name,
                "measured": POINTS[o.point],
                "last": {name: number(value) for name, value in o.last._asdict().items()},
                "clients": result.history.tested(o.point),
                "worst10_clients": worst_tenth(result.history.tested(o.point)),
                "best_on_test": number(o.best_on_test),
                "best_by_validation": number(o.by_validation),
            }
            for o in result.outcomes()
        ],
        "metrics": finals.summary() if finals else None,
        "confusion": finals.confusion.tolist() if finals and finals.confusion is not None else None,
        "privacy": result.privacy,
        "ended": result.history.ended._asdict() if result.history.ended else None,
        "rounds": max(record.number for record in result.history),
        "bytes_up": sum(record.bytes_up for record in result.history),
        "bytes_down": sum(record.bytes_down for record in result.history),
        "seconds": {p: round(sum(r.seconds.get(p, 0.0) for r in result.history), 3) for p in PHASES},
        "left_out": sorted({client for record in result.history for client in record.left_out}),
    }
