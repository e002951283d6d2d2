"""Writes the folder of a Flower app: the settings for `flwr run`, and two lines of code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from coterie.api import make_method, method_name
from coterie.core.errors import CoterieError
from coterie.deploy.pending import Timeouts
from coterie.deploy.server import Service
from coterie.deploy.transports.flower.connection import QUIET
from coterie.deploy.transports.flower.options import FEDERATION, read_run_config
from coterie.runs.disk import writing

TOP = """\
# A Flower app that runs {method}. `flwr run . SUPERLINK --run-config "rounds=5"` changes a setting for one run.
[project]
name = "{name}"
version = "1.0.0"
description = "{method} with Coterie, on Flower"
license = "Apache-2.0"
dependencies = []  # Coterie and Flower are installed already

[tool.flwr.app]
publisher = "coterie"
fab-include = ["*.py"]

[tool.flwr.app.components]
serverapp = "coterie_app:server"
clientapp = "coterie_app:client"

# "" means the default of the protocol.
[tool.flwr.app.config]
"""

CODE = """\
from coterie.deploy.transports.flower import client_app, server_app

server = server_app()
client = client_app()
"""

ABOUT = {
    "method": "`coterie methods` lists them",
    "model": "cnn, convnet, conv4, ..., or package.module:Class, also in the node config",
    "head": "name of the model's head (default: the last layer that runs)",
    "train-only": "parameters or modules to train, such as 'head|blocks.11.*' (default: all that are not frozen)",
    "task": "package.module:Class of a task that is not built in (default: the task of the nodes' data)",
    "protocol": "defaults as in a paper: pac, reg, crc or akd",
    "out": "folder for the run, on the server",
    "resume": "continue the run in `out`, if there is one",
}
DEFAULTS = {"protocol": "pac", "resume": False, "deadline": 600, "grace": 120, "wait": 3600}  # nodes start slowly


def write_app(folder: Path, method: str, asked: Mapping[str, Any]) -> list[Path]:
    """Write the app; returns its files. asked: settings that differ from the defaults."""
    method = method_name(method)
    values = {
        "method": method,
        **DEFAULTS,
        **{name: plain(value) for name, value in asked.items() if value is not None},
    }
    kinds = (Service, *FEDERATION, type(make_method(method)), Timeouts)
    known = {field.name: field for kind in kinds for field in fields(kind) if field.name != "train"}
    keys = {name: name.replace("_", "-") for name in known}
    read_run_config({keys.get(name, name): value for name, value in values.items()})  # raises if a setting is invalid
    if folder.exists():
        raise CoterieError(f"{folder} already exists")
    name = "".join(c if c.isalnum() else "-" for c in folder.resolve().name.lower()).strip("-") or "app"
    about = {**ABOUT, **{name: field.metadata.get("help", "") for name, field in known.items()}}
    settings = [line(keys.get(name, name), values.get(name, ""), help) for name, help in about.items()]
    quiet = "".join(f"export {name}={value}\n" for name, value in QUIET.items())
    files = {
        "pyproject.toml": TOP.format(method=method, name=name) + "".join(settings),
        "coterie_app.py": CODE,
        "quiet.sh": f"# No telemetry, no update check, and no installation at run time.\n{quiet}",
    }
    with writing(folder):
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in files]


def line(key: str, value: Any, help: str) -> str:
    return f"{key} = {json.dumps(value)}" + (f"  # {help}" if help else "") + "\n"


def plain(value: Any) -> Any:
    """A value that TOML can hold."""
    return ",".join(f"{a}:{b}" for a, b in value) if isinstance(value, tuple) else value
