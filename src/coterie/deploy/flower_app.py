"""The folder of a Flower app: settings that `flwr run` reads, and two lines of code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from coterie.api import make_method, method_name
from coterie.clients.remote import Patience
from coterie.core.errors import CoterieError
from coterie.deploy.options import FEDERATION, key_of, read_run
from coterie.deploy.server import Service
from coterie.network.flower import QUIET

TOP = """\
# A Flower app that runs {method}. `flwr run . SUPERLINK --run-config "rounds=5"` changes a setting for one run.
[project]
name = "{name}"
version = "1.0.0"
description = "{method} with Coterie, on Flower"
license = "Apache-2.0"
dependencies = []  # Coterie and Flower are there already

[tool.flwr.app]
publisher = "coterie"
fab-include = ["*.py"]

[tool.flwr.app.components]
serverapp = "coterie_app:server"
clientapp = "coterie_app:client"

# What is "" is as the protocol has it.
[tool.flwr.app.config]
"""

CODE = """\
from coterie.deploy.flower import client_app, server_app

server = server_app()
client = client_app()
"""

ABOUT = {
    "method": "`coterie methods` lists them",
    "model": "cnn, convnet, conv4, ..., or package.module:Class, also in the node config",
    "head": "name of the model's head, where it is not its last module",
    "protocol": "defaults as in a paper: pac, reg, crc or akd",
    "out": "folder to leave the run in, on the server",
    "resume": "go on with the run in `out`, if there is one",
}
USUAL = {"protocol": "pac", "resume": False, "deadline": 600, "grace": 120, "wait": 3600}  # nodes start slowly


def write_app(folder: Path, method: str, asked: Mapping[str, Any]) -> list[Path]:
    """The files written. asked: settings that are not as usual."""
    method = method_name(method)
    values = {"method": method, **USUAL, **{name: plain(value) for name, value in asked.items() if value is not None}}
    kinds = (Service, *FEDERATION, type(make_method(method)), Patience)
    known = {field.name: field for kind in kinds for field in fields(kind) if field.name != "train"}
    keys = {name: key_of(field) for name, field in known.items()}
    read_run({keys.get(name, name): value for name, value in values.items()})  # tells what is wrong
    if folder.exists():
        raise CoterieError(f"{folder} is there already")
    name = "".join(letter if letter.isalnum() else "-" for letter in folder.resolve().name.lower()).strip("-") or "app"
    about = {**ABOUT, **{name: field.metadata.get("help", "") for name, field in known.items()}}
    settings = [line(keys.get(name, name), values.get(name, ""), help) for name, help in about.items()]
    quiet = "".join(f"export {name}={value}\n" for name, value in QUIET.items())
    files = {
        "pyproject.toml": TOP.format(method=method, name=name) + "".join(settings),
        "coterie_app.py": CODE,
        "quiet.sh": f"# Flower tells nobody that it runs, and installs nothing while it does.\n{quiet}",
    }
    try:
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CoterieError(f"{folder} cannot be written to: {error.strerror}") from None
    return [folder / file for file in files]


def line(key: str, value: Any, help: str) -> str:
    return f"{key} = {json.dumps(value)}" + (f"  # {help}" if help else "") + "\n"


def plain(value: Any) -> Any:
    """A value of TOML's."""
    return ",".join(f"{a}:{b}" for a, b in value) if isinstance(value, tuple) else value
