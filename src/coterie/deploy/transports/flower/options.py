"""Reads settings from Flower's configs: dashed names, TOML values, and "" for settings that are not set."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from coterie.api import make_method
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.core.validation import MappingReader
from coterie.deploy.pending import Timeouts
from coterie.deploy.server import Service
from coterie.federation import Safety, Settings
from coterie.privacy import Protection
from coterie.privacy.encryption import Encryption

FEDERATION = (Settings, Safety, Protection, Encryption, LocalTraining)  # settings other than the method's


class RunConfig(NamedTuple):
    """The settings of a run config."""

    method: str
    service: Service
    timeouts: Timeouts
    model: str | None
    head: str | None
    train_only: str | None
    task: str | None
    protocol: str
    out: str | None
    resume: bool
    settings: dict[str, Any]  # of FEDERATION and the method


def read_run_config(config: Mapping[str, Any]) -> RunConfig:
    keys = opened("run config: ", config)
    method = keys.take("method", str)
    parts = [taken(keys, kind) for kind in (Service, Timeouts, *FEDERATION, type(make_method(method)))]
    model, head, train_only, task = (keys.take(name, str, None) for name in ("model", "head", "train-only", "task"))
    protocol = keys.take("protocol", str, "pac")
    out, resume = keys.take("out", str, None), keys.take("resume", bool, False)
    keys.close()
    if resume and out is None:
        raise CoterieError("run config: `resume` needs `out`, the folder of the run")
    settings = {name: value for part in parts[2:] for name, value in part.items()}
    network, rest = (model, head, train_only, task), (protocol, out, resume, settings)
    return RunConfig(method, Service(**parts[0]), Timeouts(**parts[1]), *network, *rest)


def read_options(where: str, config: Mapping[str, Any], *kinds: type) -> list[dict[str, Any]]:
    """The fields of each of these dataclasses that are set; unknown keys are errors."""
    keys = opened(where, config)
    found = [taken(keys, kind) for kind in kinds]
    keys.close()
    return found


def opened(where: str, config: Mapping[str, Any]) -> MappingReader:
    return MappingReader(where, {name: value for name, value in config.items() if value != ""})


def taken(keys: MappingReader, kind: type) -> dict[str, Any]:
    """The fields of this dataclass that are set."""
    hints, found = typing.get_type_hints(kind), {}
    for field in fields(kind):
        name, key = field.name, field.name.replace("_", "-")
        if name == "train":
            continue
        value = keys.take(key, hints[name], None)
        if value is not None:
            found[name] = value
    return found
