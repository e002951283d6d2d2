"""A finished run, from its folder. The dataset is not needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from coterie.core import order, tree
from coterie.core.errors import CoterieError
from coterie.core.local import Data
from coterie.core.method import Census
from coterie.core.model import Model, make_model
from coterie.core.samples import Transform
from coterie.federation import History, Settings
from coterie.federation.model_files import SUMS, client_file, read_sums, sha256
from coterie.federation.result import PersonalModel
from coterie.methods import AnyMethod
from coterie.models import build
from coterie.personal.config import as_tuples, check_config, made_method
from coterie.personal.records import read_class_counts, read_history, table

T = TypeVar("T")

OF_USE = ("finished", "kept", "pre", "new_post")  # where the models that are kept were measured: the first there is


@dataclass(frozen=True)
class Client:
    """One client of a run, and its model."""

    number: int
    samples: int  # for training
    classes: int  # that it has training samples of
    accuracy: float | None  # of its model, in 0..1; None: not tested
    file: Path
    size: int  # bytes of the file


class Run:
    """What a run left: its settings, what happened, and a model for every client. Read when asked for."""

    def __init__(self, path: Path, config: Mapping[str, Any], network: str | nn.Module | None = None) -> None:
        self.path, self.config, self.network = path, config, network

    @cached_property
    def method(self) -> AnyMethod:
        return self._read("config.json", lambda: made_method(self.config["method"]))

    @cached_property
    def settings(self) -> Settings:
        told = self.config["federation"]
        return self._read("config.json", lambda: Settings(**{name: as_tuples(value) for name, value in told.items()}))

    @cached_property
    def model(self) -> Model:
        """The network that all clients started from."""
        start = self._tensors("start.safetensors")
        dtype = next((t.dtype for t in start.values() if t.is_floating_point()), torch.float32)
        transform = self._read("config.json", lambda: Transform(**as_tuples(self.about["transform"])))
        made = make_model(self._network(), self.shape, self.classes, transform, self.config["network"]["head"])
        model = made.to("cpu", dtype)
        shapes = {name: t.shape for name, t in tree.items(model.start)}
        if shapes != {name: t.shape for name, t in start.items()}:
            raise CoterieError(
                f"{self.path}: the network that was built has other weights than the one that was trained; "
                "has its code changed?"
            )
        return replace(model, start=tree.fill(model.start, start))

    @cached_property
    def server(self) -> Any:
        """The server's state after the last round."""
        return self._filled("server.safetensors", self.method.server_init(self.model, self.census))

    @cached_property
    def history(self) -> History:
        return self._read("clients.csv", lambda: read_history(self.path, self.settings, self.about["clients"]))

    @cached_property
    def clients(self) -> tuple[Client, ...]:
        """Everybody who has a model."""
        accuracies = dict(zip(*self._measured, strict=True)) if self.point else {}
        sizes = self.about["train_sizes"]
        listed = []
        for row, number in enumerate(self.numbers):
            file = self._client_file(number)
            present = int((self._class_counts[row] > 0).sum())
            listed.append(Client(number, sizes[row], present, accuracies.get(number), file, self._size(file)))
        return tuple(listed)

    @cached_property
    def point(self) -> str | None:
        """Where the models that were kept are measured; None where they are not."""
        return next((point for point in OF_USE if any(self.history.with_point(point))), None)

    @property
    def about(self) -> Mapping[str, Any]:
        """What the configuration says of the data."""
        data: Mapping[str, Any] = self.config["data"]
        return data

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one raw sample."""
        return tuple(self.about["shape"])

    @property
    def dtype(self) -> torch.dtype:
        """Of raw samples."""
        dtype: torch.dtype = getattr(torch, self.about["dtype"])
        return dtype

    @property
    def classes(self) -> int:
        return int(self.about["classes"])

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.about["class_names"]) or tuple(map(str, range(self.classes)))

    @property
    def census(self) -> Census:
        return Census(torch.tensor(self.about["train_sizes"]), self._class_counts)

    def personal_model(self, client: int) -> PersonalModel:
        """A module from raw samples to logits."""
        self.check_client(client)
        name = self._client_file(client).name
        found = self._filled(name, self._template)
        made = PersonalModel(self.method, self.model, **found)
        try:
            with torch.no_grad():
                made(torch.zeros(2, *self.shape, dtype=self.dtype))
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._damaged(f"models/{name}", error) from None
        return made

    @property
    def numbers(self) -> Sequence[int]:
        """Of the clients whose models are here; a device has a few of a federation."""
        return self.about.get("ids") or range(self.about["clients"])

    def check_client(self, client: int) -> None:
        if client not in self.numbers:
            listed = ", ".join(map(str, self.numbers)) if "ids" in self.about else f"0 to {self.numbers[-1]}"
            raise CoterieError(f"{self.path}: there is no client {client}; clients are {listed}")

    @cached_property
    def _template(self) -> dict[str, Any]:
        """A state and a down of the form that the files have: those of a client with two black images."""
        method, server = self.method, self.method.server_init(self.model, self.census)
        down = method.server_send(server, torch.tensor(0))
        x = torch.zeros(2, *self.shape, dtype=self.dtype)
        y = torch.tensor([0, self.classes - 1])
        key, rate = order.seed_key(0), torch.ones((), dtype=self.model.mean.dtype)
        data = Data(x, y, key, rate, self.classes, Transform(), alone=True)
        with torch.no_grad():
            state = method.client_init(self.model, data, method.server_welcome(server))
            return {"state": method.client_finish(self.model, state, down, data), "down": down}

    @cached_property
    def _sums(self) -> dict[str, str]:
        return self._read(f"models/{SUMS}", lambda: read_sums(self.path / "models"))

    @cached_property
    def _class_counts(self) -> Tensor:
        return self._read("classes.csv", lambda: read_class_counts(self.path / "classes.csv", self.about["clients"]))

    @property
    def _measured(self) -> tuple[list[int], list[float]]:
        assert self.point is not None
        scores = list(self.history.with_point(self.point))[-1].scores[self.point, "test"]
        tested = scores.total > 0
        return scores.clients[tested].tolist(), scores.accuracy[tested].tolist()

    def _network(self) -> nn.Module:
        told = self.network or self.config["network"]["name"]
        if told is None:
            raise CoterieError(
                f"{self.path}: the network was a Python object, so it cannot be built again from its name. Give it: "
                "coterie.load_run(path, model=network), or --model package.module:Class. Runs whose model is named "
                "so from the start need nothing"
            )
        return build(told, self.shape, self.classes, self.settings.seed) if isinstance(told, str) else told

    def _client_file(self, client: int) -> Path:
        return self.path / "models" / client_file(client, max(self.numbers))

    def _size(self, file: Path) -> int:
        if not file.is_file():
            raise self._damaged(f"models/{file.name}", "it is not there")
        return file.stat().st_size

    def _tensors(self, name: str) -> tree.Tree:
        path = self.path / "models" / name
        try:
            content = path.read_bytes()
            if sha256(content) != self._sums.get(name):
                raise self._damaged(f"models/{name}", f"it has another checksum than {SUMS} says")
            return load(content)
        except FileNotFoundError:
            raise self._damaged(f"models/{name}", "it is not there") from None
        except (OSError, SafetensorError) as error:
            raise self._damaged(f"models/{name}", error) from None

    def _filled(self, name: str, form: T) -> T:
        """The tensors of a file, in this form."""
        tensors, expected = self._tensors(name), set(tree.flatten(form))
        for odd in sorted(expected ^ set(tensors)):
            raise self._damaged(f"models/{name}", f"{odd} is {'missing' if odd in expected else 'not expected'}")
        return tree.fill(form, tensors)

    def _read(self, name: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._damaged(name, error) from None

    def _damaged(self, name: str, reason: object) -> CoterieError:
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
        return CoterieError(f"{self.path / name}: damaged, or not what a run leaves ({text.splitlines()[0]})")


def load_run(path: str | Path, model: str | nn.Module | None = None) -> Run:
    """A finished run by its folder. model: the network, where the run was given one without a name."""
    path = Path(path)
    if not path.is_dir():
        raise CoterieError(f"{path}: no such folder")
    if not (path / "config.json").is_file():
        inner = sorted(found.parent.name for found in path.glob("*/config.json"))
        hint = f"; it holds several runs, name one of them: {', '.join(inner)}" if inner else ""
        raise CoterieError(f"{path}: not a folder that a run left{hint}")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CoterieError(f"{path / 'config.json'}: damaged ({error})") from None
    check_config(path, config)
    if "deployment" in config and "ids" not in config["data"]:
        raise CoterieError(
            f"{path}: this is of the server of a federation; the models are on its devices, each of which left a folder"
        )
    if not (path / "result.json").is_file():
        rounds = config["federation"]["rounds"]
        done = min(len(table(path / "metrics.csv")), rounds)
        raise CoterieError(
            f"{path}: this run was not finished, it has {done} of {rounds} rounds; "
            f"its clients have no models yet. `coterie resume {path}` goes on"
        )
    return Run(path, config, model)
