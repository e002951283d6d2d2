"""Train a personal model for a client that was not in training."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.analysis.lookup import described
from coterie.api import portrait
from coterie.api.result import Result
from coterie.core import random, tree
from coterie.core.batch import TEST_BATCH
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.wrapper import Around, innermost
from coterie.execution import LocalBackend, Looped, Turn
from coterie.execution.process import restored
from coterie.execution.scoring import slices
from coterie.federation import History, Round
from coterie.federation.rounds import sift
from coterie.personal.labelled import BY_NAME, LabelledReading, joined, read_labelled
from coterie.personal.labels import Chance
from coterie.runs.folder import Folder
from coterie.runs.stored_run import StoredRun

log = logging.getLogger(__name__)

TEST_SHARE = 0.25  # of the samples, if there is no test split


@dataclass(frozen=True)
class Adapted(Result):
    """The result of a federation with one new client."""

    given: Any = None  # the download, with the trained parts replaced

    def down(self, client: int) -> Any:
        return self.given


@restored()
def adapt(
    run: StoredRun,
    data: str | Path,
    out: str | Path,
    epochs: int | None = None,
    reading: LabelledReading = BY_NAME,
) -> Round:
    """Train a model for a new client and write it to a run folder.

    data: the client's data, in any form that `read_labelled` takes. Returns a round with the scores before
    (`new_pre`) and after training (`new_post`). Warns if the model starts far below chance: labels may be mixed up.
    """
    if Path(out).exists():
        raise CoterieError(f"{out} exists already; name another folder with --out, or remove it")
    own, method = newcomer(run, Path(data), reading), with_epochs(run.method, epochs)
    clients = Looped(method, run.model, own, run.settings.seed, processes=1)
    try:
        down, record, start = learn(run, clients)
    finally:
        clients.close()
    if start is not None and start.below:
        log.warning("%s: %s", data, start.warning("the model before training", run.class_names, reading.labels))
    result = Adapted(method, run.model, own, run.server, clients.states, History([record]), down)
    leave(out, config_of(run, method, own, Path(data)), own.train.class_counts(own.classes), result)
    return record


def newcomer(run: StoredRun, path: Path, reading: LabelledReading) -> FederatedData:
    """The samples of the new client; without a test split, a random part is held out."""
    parts = read_labelled(run, path, reading)
    if any(part.split == "test" for part in parts) and any(part.split != "test" for part in parts):
        train, test = joined([part for part in parts if part.split != "test"]), joined(parts, "test")
    else:
        groups = [part.group for part in parts if part.group is not None]
        train, test = hold_out(path, *joined(parts), run.settings.seed, np.concatenate(groups) if groups else None)
    own, held_out = (Split(*part, (len(part[1]),)) for part in (train, test))
    about: dict[str, Any] = {"transform": run.transform, "client_names": (path.stem,), "task": run.task}
    return FederatedData(path.stem, run.classes, own, held_out, class_names=run.class_names, **about)


def hold_out(
    path: Path, x: Tensor, y: Tensor, seed: int, group: NDArray[Any] | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split off a random part of the groups, or of the samples if there are no groups."""
    number = torch.arange(len(y)) if group is None else torch.from_numpy(np.unique(group, return_inverse=True)[1])
    count = int(number.max()) + 1 if len(number) else 0
    if count < 2:
        what = "sample" if group is None else "group"
        raise CoterieError(f"{path}: one {what} cannot be split into training and test samples; give more")
    drawn = random.shuffle(random.derive(random.seed_key(seed), random.NEWCOMERS), count)
    test = torch.isin(number.reshape(-1), drawn[: max(int(TEST_SHARE * count), 1)])
    return (x[~test], y[~test]), (x[test], y[test])


def with_epochs(method: AnyMethod, epochs: int | None) -> AnyMethod:
    if epochs is None:
        return method
    if isinstance(method, Around):
        return replace(method, inner=with_epochs(method.inner, epochs))
    final = {"finetune_epochs": epochs} if "finetune_epochs" in {f.name for f in fields(method)} else {}
    return replace(method, train=method.train.but(local_epochs=epochs), **final)


def learn(run: StoredRun, clients: LocalBackend) -> tuple[Any, Round, Chance | None]:
    """Train the new client; returns its download, its scores and, for classes, the initial accuracy on all samples.

    It takes the method's final step, if there is one, as all clients of the run did; otherwise it trains for one round.
    """
    method, server, settings, alone = clients.method, run.server, run.settings, torch.tensor([0])
    clients.join(method.server_welcome(server))
    down = method.server_greet(server)
    if down is None:
        raise CoterieError(f"{method.title} has no model for clients that were not in training")
    downs = tree.apply(lambda t: t[None], down)
    before = tree.fetched(clients.score(alone, downs, "test"))
    start = chance(run, clients, down) if run.classes else None
    turn = Turn(settings.rounds, method.train.rates.over_rounds(settings.rounds - 1, settings.rounds))
    if method.finishes:
        clients.finish(alone, downs, turn)
        if not bool(tree.finite(clients.states.take(alone), 1)):
            raise CoterieError("training of the new client diverged (its model is not finite); try fewer --epochs")
    else:
        returned = clients.begin(alone, downs, turn)
        sift(returned, turn)
        downs = tree.overlay(downs, returned.ups)
    after = tree.fetched(clients.score(alone, downs, "test"))
    scores = {("new_pre", "test"): before, ("new_post", "test"): after}
    record = Round(settings.rounds, alone, (), scores, bytes_down=tree.size(down), metric=clients.metric)
    return tree.pick(downs, 0), record, start


def chance(run: StoredRun, clients: LocalBackend, down: Any) -> Chance:
    """Evaluate the model before training on all samples of the new client."""
    state, data = clients.states[0], clients.data
    x, y = torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])
    with torch.no_grad():
        made = [clients.method.client_predict(run.model, state, down, x[part]) for part in slices(len(x), TEST_BATCH)]
    return Chance(int((torch.cat(made).argmax(1) == y).sum()), len(y), run.classes)


def config_of(run: StoredRun, method: AnyMethod, data: FederatedData, source: Path) -> dict[str, Any]:
    """The configuration of the run, for this client."""
    config = dict(run.config)
    config["method"] = described(innermost(method))
    sizes = {"train_sizes": list(data.train.sizes), "test_sizes": list(data.test.sizes)}
    own = {"name": data.name, "clients": 1, "client_names": list(data.client_names), "partition": None}
    config["data"] = {**run.section("data"), **own, **sizes}
    config["adapted"] = {"run": run.folder.name, "data": source.name}
    return config


def leave(out: str | Path, config: Mapping[str, Any], counts: Tensor, result: Result) -> None:
    """Write a run folder, or nothing on errors. counts: (m, K) training samples."""
    splits = sorted({split for record in result.history for _, split in record.scores}) or ["test"]
    folder, data = Folder(out, dict(config), splits, newcomers=True), config["data"]
    try:
        picture = portrait(data["name"], None, counts, data["class_names"], data["client_names"])
        folder.begin(counts, None, picture)
        for record in result.history:
            folder.add(record)
        folder.finish(result)
    except CoterieError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise CoterieError(f"{folder.path} cannot be written to") from error
    finally:
        folder.close()
