"""Trials on disk, and the training of one, resumed from its checkpoint, on data without test samples."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from coterie.api import About, Execution, choose, describe, make_network, place
from coterie.api.progress import Watching
from coterie.api.variations import Candidate, shown
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, Diverged
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.data.gather import set_aside
from coterie.execution import LocalBackend
from coterie.execution.process import restored
from coterie.federation import History, Safety, Settings, federate
from coterie.federation.newcomers import keep_out
from coterie.runs.checkpoint import Checkpoints
from coterie.runs.disk import read_inside, whole, writing
from coterie.runs.stopping import Stopped
from coterie.tuning.strategy import BudgetSpent, Job, Trial

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class TrialSetup:
    """What all trials have in common."""

    method: str | AnyMethod
    title: str
    point: str  # where the method's scores are measured
    model: str | nn.Module | Model
    head: str | None
    data: FederatedData  # its test samples are the validation samples
    protocol: str
    settings: Mapping[str, Any]  # settings that are not searched
    rounds: int  # of a full training
    how: Execution
    model_args: Mapping[str, Any]  # of the network's constructor
    train_only: str | None  # parameters that are trained

    def chosen(self, candidate: Candidate) -> tuple[AnyMethod, Settings, Safety]:
        """The method and how it is run, with the settings of a candidate."""
        settings = {**self.settings, **candidate}
        return choose(
            self.method, self.protocol, About(self.data.name, self.data.shape, self.data.num_clients), settings
        )[:3]

    def network(self, seed: int) -> Model:
        if isinstance(self.model, Model):
            return self.model
        return make_network(self.model, self.data, seed, self.head, self.model_args, self.train_only)


def without_test(data: FederatedData, share: float, new_clients: float | str, seed: int) -> FederatedData:
    """The data of the search: validation samples in place of the test samples.

    Clients that are new in the final run are left out too.
    """
    split = set_aside(data, share) if data.validation is None else data
    assert split.validation is not None
    if not sum(split.validation.sizes):
        raise CoterieError("no client has two different training samples, so none can be set aside for validation")
    searched = replace(split, test=split.validation, validation=None)
    return keep_out(searched, new_clients, seed)[0] if new_clients else searched


class Trials:
    """The folder of a search: one small file per trial, and checkpoints of unfinished trials."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder / "trials", folder / "checkpoints"
        self.settings: dict[int, Candidate] = {}  # of the candidates of loaded trials

    def load(self) -> list[Trial]:
        """Read the trials of an interrupted search."""
        with writing(self.folder):
            for path in (self.folder, self.checkpoints):
                path.mkdir(exist_ok=True)
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                stored = json.loads(read_inside(self.folder, path.name))
                found.append(Trial(Job(*stored["job"]), *(stored[name] for name in Trial._fields[1:])))
                self.settings[found[-1].job.candidate] = stored["settings"]
            except (OSError, ValueError, KeyError, TypeError):
                log.warning("%s cannot be read; running its trial again", path)
        return found

    def add(self, trial: Trial, settings: Candidate) -> None:
        """Write a trial atomically."""
        path = self.folder / f"{trial.job.candidate:04}-seed{trial.job.seed}-rounds{trial.job.rounds}.json"
        content = {"settings": settings, **trial._asdict()}
        with writing(self.folder), whole(path) as part:
            part.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def checkpoint(self, job: Job) -> Path:
        """Shared by all stages of a candidate."""
        return self.checkpoints / f"{job.candidate:04}-seed{job.seed}"

    def forget(self, candidate: int, seed: int | None = None) -> None:
        """Delete its checkpoints, of one seed or of all."""
        for path in self.checkpoints.glob(f"{candidate:04}-seed{'*' if seed is None else seed}"):
            shutil.rmtree(path, ignore_errors=True)


@restored()
def train(
    setup: TrialSetup,
    candidate: Candidate,
    job: Job,
    since: int,
    checkpoint: Path,
    watching: Watching,
    stop_signal: Callable[[], int],
    late: Callable[[float], bool],
) -> Trial:
    """Run one trial, from its checkpoint if there is one.

    since: rounds of earlier trials of this candidate. stop_signal: returns the signal that requested a stop after this
    round, or 0. late: whether the time budget is spent, given the seconds of this trial.
    """
    method, settings, safety = setup.chosen(candidate)
    settings, start = replace(settings, seed=job.seed, rounds=job.rounds), time.monotonic()
    if job.rounds != setup.rounds and method.train.rates.rounds.spans:
        raise CoterieError(
            f"the learning rates of --schedule {method.train.schedule} depend on the number of rounds, so candidates "
            "cannot train a part of them; use --search grid, random or tpe"
        )
    clients = place(method, setup.network(job.seed), setup.data, job.seed, setup.how)
    clients.largest = safety.max_magnitude
    checkpoints = Checkpoints(checkpoint, clients, config(clients, settings, setup), safety.checkpoint_every)
    reached, earlier, at_once = 0, 0.0, False

    def restore(server: Any) -> tuple[Any, History]:
        nonlocal reached, earlier
        if not usable(checkpoint, job.rounds):
            return server, History()
        server, history = checkpoints.restore(server)
        reached = len(history)
        earlier = sum(sum(record.seconds.values()) for record in history[since:])  # before the interruption
        return server, history

    def seconds() -> float:
        return round(earlier + time.monotonic() - start, 3)

    def between(server: Any, history: History) -> None:
        nonlocal reached
        reached = len(history)
        stop, over = stop_signal(), reached < job.rounds and late(seconds())
        checkpoints.after(server, history, now=stop > 0 or over or reached == job.rounds)
        if stop:
            raise Stopped(by=stop)
        if over:
            raise BudgetSpent

    try:
        with watching(f"{setup.title} {shown(candidate)} seed {job.seed}, validation", job.rounds) as watch:
            _, history = federate(
                clients, settings, watch, restore=restore, between=between, max_left_out=safety.max_left_out
            )
        return Trial(job, last(history, setup.point), reached, seconds())
    except Diverged as error:
        return Trial(job, None, reached, seconds(), str(error))
    except KeyboardInterrupt as stop:
        at_once = not isinstance(stop, Stopped)
        if at_once:
            clients.abandon()
        raise
    finally:
        checkpoints.close(wait=not at_once)
        clients.close()


def last(history: History, point: str) -> float:
    """The score after the last round."""
    score = history.curve(point)[-1][1]
    record = list(history.with_point(point))[-1]
    if math.isnan(score) and (record.scores[point, "test"].total > 0).any():
        raise CoterieError(
            f"{record.metric.words} is undefined for the validation samples of all clients, as AUROC is where a "
            "client has one class; choose another metric, such as accuracy, or a larger --validation share"
        )
    if math.isnan(score):
        raise CoterieError(
            "no client that was measured after the last round has validation samples; use a larger --validation share, "
            "or --full-last-round"
        )
    return score


def usable(checkpoint: Path, rounds: int) -> bool:
    """Whether there is a checkpoint that is not past this round; deletes one that is, left by a lost trial file."""
    names = [path.stem for path in checkpoint.glob("server-*.safetensors")]
    if any(int(name.removeprefix("server-")) > rounds for name in names):
        shutil.rmtree(checkpoint)
        return False
    return bool(names)


def config(clients: LocalBackend, settings: Settings, setup: TrialSetup) -> dict[str, Any]:
    """The configuration that a checkpoint must match; the same for all stages."""
    return describe(clients, None, replace(settings, rounds=setup.rounds), {"execution": asdict(setup.how)})
