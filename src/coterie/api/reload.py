"""The result of a finished run, from its folder and the clients that it ran with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.api.result import Result
from coterie.core.wrapper import innermost
from coterie.execution import Backend, LocalBackend
from coterie.federation.history import History
from coterie.runs.checkpoint_files import read_all_records
from coterie.runs.checksums import RunFiles
from coterie.runs.extending import ended_of
from coterie.runs.model_files import ModelFiles, client_file, client_form


def reloaded(path: Path, clients: Backend, privacy: Mapping[str, Any] | None, config: Mapping[str, Any]) -> Result:
    """The result as `coterie.run` returned it. clients: the back end of the run; nothing is trained."""
    method, model = innermost(clients.method), replace(clients.model.to("cpu"), precision="fp32")
    history = History(read_all_records(path / "checkpoint"))
    history.ended = ended_of(path)
    server, files = method.server_init(model, clients.census), ModelFiles(RunFiles(path))
    states, data = clients.states.blank(), clients.data if isinstance(clients, LocalBackend) else None
    if data is not None:
        form = client_form(method, model, server, data.shape, data.train.x.dtype)
        for client in range(clients.count):
            states[client] = files.filled(client_file(client, clients.count - 1), form)["state"]
        states.settle()
    server = files.filled("server.safetensors", server)
    return Result(method, model, data, server, states, history, privacy=privacy, config=config, folder=path)
