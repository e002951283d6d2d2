"""Settings as Flower has them: names with dashes, values of TOML, and an empty text for what is not set."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, NamedTuple

from coterie.api import make_method
from coterie.clients.remote import Patience
from coterie.core.errors import CoterieError
from coterie.core.local import Sgd
from coterie.deploy.server import Service
from coterie.federation import Safety, Settings
from coterie.protection import Protection
from coterie.protection.encryption import Encryption
from coterie.recipes.keys import Keys

FEDERATION = (Settings, Safety, Protection, Encryption, Sgd)  # what is set beside the method's own


class Wanted(NamedTuple):
    """What a run config asks for."""

    method: str
    service: Service
    patience: Patience
    model: str | None
    head: str | None
    protocol: str
    out: str | None
    resume: bool
    settings: dict[str, Any]  # of FEDERATION and the method


def read_run(config: Mapping[str, Any]) -> Wanted:
    keys = opened("run config: ", config)
    method = keys.take("method", str)
    parts = [taken(keys, kind) for kind in (Service, Patience, *FEDERATION, type(make_method(method)))]
    model, head = keys.take("model", str, None), keys.take("head", str, None)
    protocol = keys.take("protocol", str, "pac")
    out, resume = keys.take("out", str, None), keys.take("resume", bool, False)
    keys.close()
    if resume and out is None:
        raise CoterieError("run config: which run is to be resumed? Name its folder as `out`")
    settings = {name: value for part in parts[2:] for name, value in part.items()}
    return Wanted(method, Service(**parts[0]), Patience(**parts[1]), model, head, protocol, out, resume, settings)


def read_options(where: str, config: Mapping[str, Any], *kinds: type) -> list[dict[str, Any]]:
    """The fields of each of these dataclasses that are set; an error if there are others."""
    keys = opened(where, config)
    found = [taken(keys, kind) for kind in kinds]
    keys.close()
    return found


def opened(where: str, config: Mapping[str, Any]) -> Keys:
    return Keys(where, {name: value for name, value in config.items() if value != ""})


def taken(keys: Keys, kind: type) -> dict[str, Any]:
    """The fields of this dataclass that are set."""
    hints, found = typing.get_type_hints(kind), {}
    for field in fields(kind):
        name, key = field.name, key_of(field)
        if name == "train":
            continue
        if key == "lr-steps" and isinstance(keys.left.get(key), str):
            keys.left[key] = steps(keys.left[key])
        value = keys.take(key, hints[name], None)
        if value is not None:
            found[name] = value
    return found


def key_of(field: Field[Any]) -> str:
    """As its flag is called on the command line."""
    return str(field.metadata.get("flags", (field.name.replace("_", "-"),))[0])


def steps(text: str) -> list[list[float]]:
    """Such as 50:0.2,75:0.02."""
    try:
        return [[int(a), float(b)] for a, b in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise CoterieError(f"run config: lr-steps is '{text}': it must be ROUND:FACTOR,ROUND:FACTOR") from None
