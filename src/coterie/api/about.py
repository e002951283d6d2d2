"""What a run folder says of a run: data, method, model, machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from coterie.clients import Clients, Resident
from coterie.core import tree
from coterie.core.around import innermost
from coterie.core.samples import FederatedData
from coterie.data import picture
from coterie.federation import Settings
from coterie.federation.checkpoint import checksum
from coterie.version import VERSION


def describe(
    clients: Clients, newcomers: Resident | None, settings: Settings, config: Mapping[str, Any]
) -> dict[str, Any]:
    """All that is needed to know, or do again, what was run. config: what to add, or put in the place of it."""
    method, cuda = innermost(clients.method), clients.device.type == "cuda"
    told: dict[str, Any] = {
        "method": {"name": method.title, **asdict(method)},
        "model": {
            "encoder": str(clients.model.encoder),
            "head": str(clients.model.head),
            "parameters": sum(t.numel() for part in clients.model.start for t in part.values()),
            "start": checksum(tree.flatten(clients.model.start), {}),
        },
        "federation": asdict(settings),
        "ran": {
            "clients": type(clients).__name__,
            "device": clients.device.type,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "coterie": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        },
    }
    if isinstance(clients, Resident):
        told["data"] = facts(clients.data) | {"new_content": newcomers and fingerprint(newcomers.data)}
    return {**told, **config}


def facts(data: FederatedData) -> dict[str, Any]:
    """What config.json says of the data."""
    partition = data.partition
    return {
        "name": data.name,
        "clients": data.clients,
        "classes": data.classes,
        "class_names": list(data.class_names),
        "shape": list(data.shape),
        "dtype": str(data.train.x.dtype).removeprefix("torch."),
        "train_sizes": list(data.train.sizes),
        "test_sizes": list(data.test.sizes),
        "content": fingerprint(data),
        "transform": asdict(data.transform),
        "partition": partition and {"name": partition.name, "hash": partition.hash, **partition.settings},
    }


def fingerprint(data: FederatedData) -> str:
    """SHA-256 of all samples, and of who has them."""
    held = {name: split for name in ("train", "test", "validation") if (split := getattr(data, name)) is not None}
    sizes = {name: list(split.sizes) for name, split in held.items()}
    return checksum({f"{name}.{part}": getattr(split, part) for name, split in held.items() for part in "xy"}, sizes)


def portrait(name: str, rule: str | None, counts: Tensor, names: Sequence[str]) -> str:
    """An SVG of the classes on each client, (m, K)."""
    title = f"{name}{f', {rule}' if rule else ''}: {len(counts)} clients, {int(counts.sum())} training samples"
    return picture(title, counts.numpy(), tuple(names) or tuple(map(str, range(counts.shape[1]))))
