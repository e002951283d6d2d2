"""The folder `models` of a run: a file for the server, for the start and for every client, and checksums of all.

`sha256sum --check models.sha256` in that folder finds what has changed since.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from coterie.core import tree
from coterie.federation.disk import sync_all
from coterie.federation.result import Result

SUMS = "models.sha256"


def client_file(client: int, highest: int) -> str:
    """Its name; all have as many digits as the highest number."""
    return f"client-{client:0{len(str(highest))}}.safetensors"


def write_models(folder: Path, result: Result, data: Mapping[str, Any]) -> None:
    """All of them are on the disk when this returns. data: what the configuration says of them."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped while it wrote them
    folder.mkdir()
    sums = []
    for name, content in model_files(result, data):
        (folder / name).write_bytes(content)
        sums.append(f"{sha256(content)}  {name}\n")
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")
    sync_all([*folder.iterdir(), folder])


def model_files(result: Result, data: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each."""
    about = {"method": result.method.title, "data": data["name"], "classes": str(data["classes"])}
    yield "server.safetensors", save(plain(tree.flatten(result.server)), about)
    yield "start.safetensors", save(plain(tree.flatten(result.model.start)), about)
    for client in result.clients:
        weights = plain(result.personal_weights(client))
        yield client_file(client, max(result.clients)), save(weights, {**about, "client": str(client)})


def plain(tensors: tree.Tree) -> tree.Tree:
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def read_sums(folder: Path) -> dict[str, str]:
    """Name of a file -> its SHA-256 when it was written."""
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
