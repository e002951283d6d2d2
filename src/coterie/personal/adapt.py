"""A personal model for a client that was never there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.api import portrait
from coterie.clients import Looped, Resident, Turn
from coterie.core import order, tree
from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData, Split, Transform
from coterie.federation import History, Result, Round
from coterie.federation.folder import Folder
from coterie.federation.rounds import sift
from coterie.methods import AnyMethod
from coterie.personal.config import as_tuples
from coterie.personal.run import Run
from coterie.personal.samples import has_arrays, read_labelled

TEST_SHARE = 0.25  # of the samples, where no test samples are given


@dataclass(frozen=True)
class Adapted(Result):
    """A federation of one newcomer."""

    given: Any = None  # what it was sent; what it trained of that is in its place

    def down(self, client: int) -> Any:
        return self.given


def adapt(run: Run, data: str | Path, out: str | Path, epochs: int | None = None) -> Round:
    """Make the model, leave it in a folder like that of a run, and tell how it does before (`new_pre`) and after."""
    if Path(out).exists():
        raise CoterieError(f"{out} exists already; name another folder with --out, or remove it")
    own, method = newcomer(run, Path(data)), with_epochs(run.method, epochs)
    clients = Looped(method, run.model, own, run.settings.seed, processes=1)
    try:
        down, record = learn(run, clients)
    finally:
        clients.close()
    result = Adapted(method, run.model, own, run.server, clients.states, History([record]), down)
    leave(out, told(run, method, own, Path(data)), own.train.class_counts(own.classes), result)
    return record


def newcomer(run: Run, path: Path) -> FederatedData:
    """Its samples: x and y, and x_test and y_test or else a random part of the first."""
    x, y = read_labelled(run, path)
    if has_arrays(path, "x_test", "y_test"):
        train, test = (x, y), read_labelled(run, path, "x_test", "y_test")
    else:
        train, test = set_aside(path, x, y, run.settings.seed)
    transform = Transform(**as_tuples(run.about["transform"]))
    own, held_out = (Split(*part, (len(part[1]),)) for part in (train, test))
    return FederatedData(path.stem, run.classes, own, held_out, transform=transform, class_names=run.class_names)


def set_aside(path: Path, x: Tensor, y: Tensor, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if len(y) < 2:
        raise CoterieError(f"{path}: one sample cannot be both for training and for testing; give x_test and y_test")
    drawn = order.shuffle(order.fold(order.seed_key(seed), order.NEWCOMERS), len(y))
    out = max(int(TEST_SHARE * len(y)), 1)
    train, test = drawn[out:].sort().values, drawn[:out].sort().values
    return (x[train], y[train]), (x[test], y[test])


def with_epochs(method: AnyMethod, epochs: int | None) -> AnyMethod:
    if epochs is None:
        return method
    final = {"finetune_epochs": epochs} if "finetune_epochs" in {f.name for f in fields(method)} else {}
    return replace(method, train=method.train.but(epochs=epochs), **final)


def learn(run: Run, clients: Resident) -> tuple[Any, Round]:
    """What the newcomer has of the server in the end, and its accuracies.

    It takes the final step of the method, where there is one, as all clients of the run did; else it trains once.
    """
    method, server, settings, alone = clients.method, run.server, run.settings, torch.tensor([0])
    clients.join(method.server_welcome(server))
    down = method.server_greet(server)
    if down is None:
        raise CoterieError(f"{method.title} has nothing to give to clients that were not in training")
    downs = tree.apply(lambda t: t[None], down)
    before = tree.fetched(clients.score(alone, downs, "test"))
    turn = Turn(settings.rounds, settings.rate(settings.rounds - 1))
    if method.finishes:
        clients.finish(alone, downs, turn)
        if not bool(tree.finite(clients.states.take(alone), 1)):
            raise CoterieError("the model of the new client is not finite, so training diverged; try fewer --epochs")
    else:
        returned = clients.begin(alone, downs, turn)
        sift(returned, turn)
        downs = tree.overlay(downs, returned.ups)
    after = tree.fetched(clients.score(alone, downs, "test"))
    scores = {("new_pre", "test"): before, ("new_post", "test"): after}
    return tree.pick(downs, 0), Round(settings.rounds, alone, (), scores, bytes_down=tree.size(down))


def told(run: Run, method: AnyMethod, data: FederatedData, source: Path) -> dict[str, Any]:
    """The configuration of the run, for this one client."""
    config = dict(run.config)
    config["method"] = {"name": method.title, **asdict(method)}
    sizes = {"train_sizes": list(data.train.sizes), "test_sizes": list(data.test.sizes)}
    config["data"] = {**run.about, "name": data.name, "clients": 1, **sizes, "partition": None}
    config["adapted"] = {"run": run.path.name, "data": source.name}
    return config


def leave(out: str | Path, config: Mapping[str, Any], counts: Tensor, result: Result) -> None:
    """A folder like that of a run, or none. counts: (m, K) training samples."""
    splits = sorted({split for record in result.history for _, split in record.scores}) or ["test"]
    folder, data = Folder(out, dict(config), splits, newcomers=True), config["data"]
    try:
        folder.begin(counts, None, portrait(data["name"], None, counts, data["class_names"]))
        for record in result.history:
            folder.add(record)
        folder.finish(result)
    except CoterieError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise CoterieError(f"{folder.path} cannot be written to") from error
    finally:
        folder.close()
