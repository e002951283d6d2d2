"""The folder `models` of a run: one file for the server, one for the start and one for each client, with checksums.

`sha256sum --check models.sha256` in that folder finds files that have changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.rehearsal import known_classes
from coterie.federation.trained import TrainedFederation
from coterie.runs.checksums import RunFiles
from coterie.runs.disk import open_inside, read_inside, sync_all
from coterie.runs.tensor_files import packed

T = TypeVar("T")
SUMS = "models.sha256"


def client_file(client: int, highest: int) -> str:
    """The file's name, with as many digits as the highest number has."""
    return f"client-{client:0{len(str(highest))}}.safetensors"


def write_models(folder: Path, result: TrainedFederation, data: Mapping[str, Any]) -> None:
    """Write all files and wait until they are on the disk. data: that section of config.json."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped while it wrote them; never through a link
    folder.mkdir()
    sums = []
    for name, content in model_files(result, data):
        (folder / name).write_bytes(content)
        sums.append(f"{sha256(content)}  {name}\n")
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")
    sync_all([*folder.iterdir(), folder])


def model_files(result: TrainedFederation, data: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file."""
    about = {"method": result.method.title, "data": data["name"], "classes": str(data["classes"])}
    yield "server.safetensors", packed(plain(tree.flatten(result.server)), about)
    yield "start.safetensors", packed(plain(tree.flatten(result.model.start)), about)
    if frozen := result.model.frozen:
        yield "frozen.safetensors", packed(plain(frozen), about)
    for client in result.client_ids:
        weights = plain(result.personal_weights(client))
        yield client_file(client, max(result.client_ids)), packed(weights, {**about, "client": str(client)})


def plain(tensors: tree.Tree) -> tree.Tree:
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Client:
    """One client of a run, and its model."""

    number: int
    name: str  # the number, if clients have no names
    samples: int  # for training
    classes: int  # with training samples
    score: float | None  # of its model, by the metric of the run; None: not tested
    tested: int  # test samples
    interval: tuple[float, float] | None  # Wilson's 95 % interval, of metrics that count samples
    file: Path
    size: int  # bytes of the file


class ModelFiles:
    """The models of a finished run. Each file is verified against models.sha256 when it is read."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files

    @cached_property
    def sums(self) -> dict[str, str]:
        """Name of a file -> its SHA-256."""
        with self.files.parsing(f"models/{SUMS}"):
            lines = self.files.read(f"models/{SUMS}").decode().splitlines()
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}

    def tensors(self, name: str) -> tree.Tree:
        try:
            return load(self._content(name))
        except SafetensorError as error:
            raise self.files.damaged(f"models/{name}", error) from None

    def _content(self, name: str) -> bytes:
        try:
            content = read_inside(self.files.folder, f"models/{name}")
        except FileNotFoundError:
            raise self.files.damaged(f"models/{name}", "it is missing") from None
        except OSError as error:
            raise self.files.damaged(f"models/{name}", error) from None
        if sha256(content) != self.sums.get(name):
            raise self.files.damaged(f"models/{name}", f"its checksum is not the one in {SUMS}")
        return content

    def verify(self) -> None:
        """Check all files."""
        for name in self.sums:
            self._content(name)

    def filled(self, name: str, form: T) -> T:
        """The tensors of a file in a tree of this form."""
        tensors, expected = self.tensors(name), set(tree.flatten(form))
        for odd in sorted(expected ^ set(tensors)):
            problem = "missing" if odd in expected else "not expected"
            raise self.files.damaged(f"models/{name}", f"{odd} is {problem}")
        return tree.fill(form, tensors)

    def size(self, name: str) -> int:
        """Bytes."""
        try:
            with open_inside(self.files.folder, f"models/{name}") as stream:
                return os.fstat(stream.fileno()).st_size
        except FileNotFoundError:
            raise self.files.damaged(f"models/{name}", "it is missing") from None


def client_form(method: AnyMethod, model: Model, server: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """State and download of a client in the form that its file has, made from two blank samples.

    shape, dtype: of a raw sample.
    """
    down = method.server_send(server, torch.tensor(0))
    x, y = torch.zeros(2, *shape, dtype=dtype), model.task.example(model.label)
    rate = torch.ones((), dtype=model.mean.dtype)
    data = Data(x, y, random.seed_key(0), rate, known_classes(model), Transform(), alone=True)
    with torch.no_grad():
        state = method.client_init(model, data, method.server_welcome(server))
        return {"state": method.client_finish(model, state, down, data), "down": down}
