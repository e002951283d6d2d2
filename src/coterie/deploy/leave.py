"""The folder that a device leaves: the models of its clients, for `coterie models`, `predict`, `export`."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.api import facts
from coterie.clients import Scores, States
from coterie.core import tree
from coterie.core.around import innermost, innermost_down
from coterie.core.errors import CoterieError
from coterie.deploy.device import Device
from coterie.deploy.terms import Brief
from coterie.federation import History, Result, Round, Settings
from coterie.personal.adapt import leave
from coterie.version import VERSION


@dataclass(frozen=True)
class Own(Result):
    """A federation, as far as one device has seen it."""

    models: dict[int, dict[str, Any]] = field(default_factory=dict)  # client -> what its model is made of

    @property
    def clients(self) -> Sequence[int]:
        return sorted(self.models)

    def personal_weights(self, client: int) -> tree.Tree:
        return tree.flatten(self.models[client])


def leave_models(device: Device, brief: Brief, out: Path) -> Path:
    found = {client: model for client in device.ids if (model := device.personal(client)) is not None}
    for model in found.values():
        model["down"] = innermost_down(device.method, model["down"])
    if not found:
        raise CoterieError("the federation ended before the clients of this device had a model")
    ids = tuple(sorted(found))
    data = device.data.pick([device.ids.index(client) for client in ids])
    record = Round(max(device.round, 1), torch.tensor(ids), scores=scores(device, ids))
    states = States(len(ids), torch.device("cpu"))
    result = Own(innermost(device.method), device.model, data, (), states, History([record]), found)
    config = {
        "method": brief.method,
        "network": {"name": brief.network, "head": brief.head},
        "data": {**facts(data), "ids": list(ids)},
        "federation": asdict(Settings(rounds=brief.rounds, seed=brief.seed)),
        "deployment": {"federation": brief.federation, "clients": brief.clients},
        "ran": {
            "clients": type(device).__name__,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "coterie": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(),
        },
    }
    leave(out, config, data.train.class_counts(data.classes), result)
    return out


def scores(device: Device, ids: tuple[int, ...]) -> dict[tuple[str, str], Scores]:
    """Of the models that are left, as they were measured last."""
    measured = [client for client in ids if client in device.measured]
    point = "finished" if device.method.finishes else "pre"
    found = {}
    for split in device.agreement.splits if measured else ():
        correct, total, loss = torch.stack([device.measured[client][split] for client in measured]).unbind(1)
        found[point, split] = Scores(torch.tensor(measured), correct, total.long(), loss)
    return found
