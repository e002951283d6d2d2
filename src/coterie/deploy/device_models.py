"""The run folder of a device: the models of its clients, for `coterie models`, `predict` and `export`."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.api import facts
from coterie.api.result import Result
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.version import VERSION
from coterie.core.wrapper import lasting, lasting_down
from coterie.deploy.device import Device
from coterie.deploy.device_setup import DevicePolicy
from coterie.deploy.handshake import Terms
from coterie.execution import ClientMemory, Scores
from coterie.federation import History, Round, Settings
from coterie.personal.adapt import leave
from coterie.runs.describe import described_task


@dataclass(frozen=True)
class DeviceResult(Result):
    """The result of a federation on one device."""

    models: dict[int, dict[str, Any]] = field(default_factory=dict)  # client -> its state and last download

    @property
    def client_ids(self) -> Sequence[int]:
        return sorted(self.models)

    def personal_weights(self, client: int) -> tree.Tree:
        return tree.flatten(self.models[client])


def save_models(device: Device, terms: Terms, out: Path, policy: DevicePolicy) -> Path:
    """Write the run folder of a device; returns its path."""
    found = {client: model for client in device.ids if (model := device.personal(client)) is not None}
    for model in found.values():
        model["down"] = lasting_down(device.method, model["down"])
    if not found:
        raise CoterieError("the federation ended before any client of this device had a model")
    ids = tuple(sorted(found))
    data = device.data.pick([device.ids.index(client) for client in ids])
    record = Round(
        max(device.round, 1), torch.tensor(ids), scores=scores(device, ids), metric=device.model.task.metric.scale
    )
    states = ClientMemory(len(ids), torch.device("cpu"))
    result = DeviceResult(lasting(device.method), device.model, data, (), states, History([record]), found)
    config = {
        "method": terms.method,
        "network": {
            "name": terms.network,
            "head": terms.head,
            "args": dict(policy.model_args),
            "train_only": terms.train_only,
        },
        "task": described_task(device.model.task),
        "data": {**facts(data), "ids": list(ids)},
        "federation": asdict(Settings(rounds=terms.rounds, seed=terms.seed)),
        "deployment": {"federation": terms.federation, "clients": terms.clients},
        "ran": {
            "backend": type(device).__name__,
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
    """The last scores of the saved models."""
    measured = [client for client in ids if client in device.measured]
    point = "finished" if device.method.finishes else "pre"
    found = {}
    for split in device.agreement.splits if measured else ():
        correct, total, loss = torch.stack([device.measured[client][split] for client in measured]).unbind(1)
        found[point, split] = Scores(torch.tensor(measured), correct, total.long(), loss)
    return found
