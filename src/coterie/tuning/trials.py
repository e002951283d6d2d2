"""Trials on disk, and how one is trained: from its checkpoint on, on data that have no test samples."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from coterie.api import Execution, choose, describe, make_network, place
from coterie.clients import Resident
from coterie.core.errors import CoterieError, Diverged
from coterie.core.model import Model
from coterie.core.samples import FederatedData
from coterie.federation import History, Round, Safety, Settings, federate
from coterie.federation.checkpoint import Checkpoints
from coterie.federation.disk import whole
from coterie.federation.stopping import Stopped
from coterie.methods import AnyMethod
from coterie.tuning.schedule import Job, Spent, Trial
from coterie.tuning.space import Candidate, shown

log = logging.getLogger("coterie")
Watching = Callable[[str, int], AbstractContextManager[Callable[[Round], None]]]  # title and rounds -> who looks on


@dataclass(frozen=True)
class Task:
    """What all trials have in common."""

    method: str
    title: str
    point: str  # where the method's accuracy is measured
    model: str | nn.Module | Model
    head: str | None
    data: FederatedData  # of the search: the validation samples stand where test samples are, and there are no others
    protocol: str
    settings: Mapping[str, Any]  # what is not searched
    rounds: int  # of a full training
    how: Execution

    def chosen(self, candidate: Candidate) -> tuple[AnyMethod, Settings, Safety]:
        """The method, and how it is run, with the settings of a candidate."""
        settings = {**self.settings, **candidate}
        return choose(self.method, self.protocol, self.data.name, self.data.shape, settings)[:3]

    def network(self, seed: int) -> Model:
        if isinstance(self.model, Model):
            return self.model
        return make_network(self.model, self.data, seed, self.head)


class Trials:
    """The folder of a search: a small file for each trial, and checkpoints of those that may go on."""

    def __init__(self, folder: Path, candidates: list[Candidate]) -> None:
        self.folder, self.candidates = folder / "trials", candidates
        self.checkpoints = folder / "checkpoints"

    def load(self) -> list[Trial]:
        """Those that were done before."""
        with writing(self.folder):
            for path in (self.folder, self.checkpoints):
                path.mkdir(exist_ok=True)
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                found.append(Trial(Job(*told["job"]), *(told[name] for name in Trial._fields[1:])))
            except (OSError, ValueError, KeyError, TypeError):
                log.warning("%s cannot be read; its trial is run again", path)
        return found

    def add(self, trial: Trial) -> None:
        """All of the file or nothing of it."""
        path = self.folder / f"{trial.job.candidate:04}-seed{trial.job.seed}-rounds{trial.job.rounds}.json"
        told = {"settings": self.candidates[trial.job.candidate], **trial._asdict()}
        with writing(self.folder), whole(path) as part:
            part.write_text(json.dumps(told) + "\n", encoding="utf-8")

    def checkpoint(self, job: Job) -> Path:
        """Of all rungs of a candidate."""
        return self.checkpoints / f"{job.candidate:04}-seed{job.seed}"

    def forget(self, candidate: int, seed: int | None = None) -> None:
        """Its checkpoints, of one seed or of all."""
        for path in self.checkpoints.glob(f"{candidate:04}-seed{'*' if seed is None else seed}"):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with the disk, told to the user."""
    try:
        yield
    except OSError as error:
        raise CoterieError(f"{path} cannot be written to: {error.strerror}") from None


def train(
    task: Task,
    candidate: Candidate,
    job: Job,
    since: int,
    checkpoint: Path,
    watching: Watching,
    asked: Callable[[], int],
    late: Callable[[float], bool],
) -> Trial:
    """One trial, from its checkpoint on if there is one.

    since: rounds that earlier trials have paid for. asked: by which signal to stop after this round, or 0. late:
    whether the time is over, so many seconds into this trial.
    """
    method, settings, safety = task.chosen(candidate)
    settings, start = replace(settings, seed=job.seed, rounds=job.rounds), time.monotonic()
    clients = place(method, task.network(job.seed), task.data, job.seed, task.how)
    checkpoints = Checkpoints(checkpoint, clients, config(clients, settings, task), safety.checkpoint_every)
    reached, earlier, at_once = 0, 0.0, False

    def restore(server: Any) -> tuple[Any, History]:
        nonlocal reached, earlier
        if not usable(checkpoint, job.rounds):
            return server, History()
        server, history = checkpoints.restore(server)
        reached = len(history)
        earlier = sum(sum(record.seconds.values()) for record in history[since:])  # before it was stopped
        return server, history

    def seconds() -> float:
        return round(earlier + time.monotonic() - start, 3)

    def between(server: Any, history: History) -> None:
        nonlocal reached
        reached = len(history)
        stop, over = asked(), reached < job.rounds and late(seconds())
        checkpoints.after(server, history, now=stop > 0 or over or reached == job.rounds)
        if stop:
            raise Stopped(by=stop)
        if over:
            raise Spent

    try:
        with watching(f"{task.title} {shown(candidate)} seed {job.seed}, validation", job.rounds) as watch:
            _, history = federate(
                clients, settings, watch, restore=restore, between=between, max_left_out=safety.max_left_out
            )
        return Trial(job, last(history, task.point), reached, seconds())
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
    """The accuracy after the last round, which is always measured."""
    accuracy = history.curve(point)[-1][1]
    if math.isnan(accuracy):
        raise CoterieError(
            "no client that was measured after the last round has validation samples; set a larger share aside, or "
            "let all clients train at the end with --full-last-round"
        )
    return accuracy


def usable(checkpoint: Path, rounds: int) -> bool:
    """Whether there is one, and not of a later round, as when the file of a trial was lost."""
    names = [path.stem for path in checkpoint.glob("server-*.safetensors")]
    if any(int(name.removeprefix("server-")) > rounds for name in names):
        shutil.rmtree(checkpoint)
        return False
    return bool(names)


def config(clients: Resident, settings: Settings, task: Task) -> dict[str, Any]:
    """What a checkpoint must agree with: the same for all rungs, as more rounds change nothing in those before."""
    return describe(clients, None, replace(settings, rounds=task.rounds), {"execution": asdict(task.how)})
