"""One cell of a leaderboard: a method on a benchmark. It is tuned, then trained with each seed."""

from __future__ import annotations

import platform
import shutil
import time
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.analysis.outcomes import title
from coterie.api import VARY, DataSettings, Execution, execute, find_data
from coterie.api.interrupting import INTERRUPTED
from coterie.api.progress import Watching, unwatched
from coterie.api.result import Result
from coterie.api.variations import Candidate
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, Diverged
from coterie.core.version import VERSION
from coterie.data import divide, federate, filled
from coterie.federation.finals import reported_model
from coterie.federation.history import POINTS
from coterie.papers.leaderboard.files import SEARCHES, BoardFolder, FileKey
from coterie.papers.leaderboard.rules import BASE, Benchmark, BoardRules
from coterie.papers.reproduce import OutOfTime, over
from coterie.papers.results import committed, hardware
from coterie.tuning.search import about, begun, best_of, check, do_trials, make_setup
from coterie.tuning.standings import ranked
from coterie.tuning.strategy import SearchBudget, Stage, Stages
from coterie.tuning.trials import Trials, TrialSetup, without_test


class BoardCircumstances(NamedTuple):
    """How and where cells are run."""

    how: Execution
    data_dir: str | None
    commit: str | None
    jobs: int  # cells that share the machine
    deadline: float | None  # seconds since the epoch

    def late(self) -> bool:
        return over(self.deadline)

    @property
    def provenance(self) -> dict[str, Any]:
        return {
            "date": time.strftime("%Y-%m-%d"),
            "coterie": VERSION,
            "commit": self.commit or committed(Path(__file__).parents[2]),
            "hardware": hardware(self.how.device) | ({"jobs": self.jobs} if self.jobs > 1 else {}),
            "libraries": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
            "precision": self.how.precision,
        }


class BoardJob(NamedTuple):
    """The remaining work of a cell."""

    rules: BoardRules
    benchmark: Benchmark
    method: str
    tuning: dict[str, Any] | None  # its file, if there is one
    seeds: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{self.benchmark.id} {title(self.method)}"

    @property
    def work(self) -> float:
        """Local steps of everything that is left."""
        trials = (1 - self.rules.validation) * self.rules.trials if self.tuning is None else 0
        return self.benchmark.plan(self.method, {}).work * (trials + len(self.seeds))

    def header(self, seed: int | None) -> dict[str, Any]:
        own = self.rules.hash(self.benchmark, self.method)
        return {"benchmark": self.benchmark.id, "method": self.method, "seed": seed, "protocol": own}

    def data(self, seed: int, data_dir: str | None) -> FederatedData:
        plan = self.benchmark.plan(self.method, {})
        partition = {k: seed if k == "seed" and v == VARY else v for k, v in plan.partition.items()}
        data = divided(plan.dataset, plan.rule, tuple(partition.items()), data_dir)
        if data.partition is not None and data.partition.merged:
            raise CoterieError(
                f"{self.benchmark.id}: the partition {plan.rule} pools training and test samples, so tuning could see "
                "test samples of another seed; use dirichlet-pac or another rule that keeps them apart"
            )
        return data


@lru_cache(maxsize=2)
def divided(dataset: str, rule: str, settings: tuple[tuple[str, Any], ...], data_dir: str | None) -> FederatedData:
    """The clients of a benchmark, prepared as `coterie run` does."""
    wanted = DataSettings(dataset, data_dir=data_dir, protocol=BASE)
    source = find_data(wanted)
    return filled(federate(source, divide(source, rule, **dict(settings))), wanted.missing)


def run_cell(
    job: BoardJob,
    folder: BoardFolder,
    where: BoardCircumstances,
    watching: Watching = unwatched,
) -> str:
    """Tune a method unless that is done, train it with each seed, and write a file for each. Returns a summary."""
    start, tuning = time.monotonic(), job.tuning
    if tuning is None:
        if where.late():
            raise OutOfTime("not started")
        tuning = tune_cell(job, folder, where, watching)
    if (reason := tuning.get("refused")) or (reason := tuning.get("failed")):
        return f"has no result: {reason}"
    for done, seed in enumerate(job.seeds):
        if where.late():
            raise OutOfTime(f"tuned, {done} of {len(job.seeds)} seeds done")
        train_seed(job, seed, tuning["settings"], folder, where, watching)
    return f"{time.monotonic() - start:.0f} s"


def tune_cell(job: BoardJob, folder: BoardFolder, where: BoardCircumstances, watching: Watching) -> dict[str, Any]:
    """Choose the settings by their score on validation samples. The choice is written, and returned."""
    start, seed = time.monotonic(), job.rules.tuning_seed
    searched = without_test(job.data(seed, where.data_dir), job.rules.validation, 0.0, seed)
    tried = job.rules.candidates(job.benchmark, job.method)
    plan = job.benchmark.plan(job.method, {})
    fixed = {k: v for k, v in job.benchmark.recipe.settings.items() if k not in tried[0]}
    fixed |= {"evaluate_every": plan.federation.rounds, "checkpoint_every": 0}
    base = job.benchmark.recipe.protocol
    content = job.header(None) | {"refused": refusal(job, tried[0], searched, where), "failed": None}
    if content["refused"] is None:
        setup = make_setup(job.method, plan.model, None, searched, base, fixed, where.how, {}, None)
        check(setup, tried)
        try:
            content |= search(job, setup, tried, folder, where, watching)
        except Diverged as error:
            content["failed"] = str(error)
    content |= {"seconds": round(time.monotonic() - start, 2), **where.provenance}
    folder.add(FileKey(job.benchmark.id, job.method, None), content)
    return content


def refusal(job: BoardJob, settings: Candidate, data: FederatedData, where: BoardCircumstances) -> str | None:
    """Why the method does not accept the data or the network, found by one round; None if it does."""
    plan = job.benchmark.plan(job.method, settings)
    federation = asdict(replace(plan.federation, rounds=1, evaluate_every=1, seed=job.rules.tuning_seed))
    base = job.benchmark.recipe.protocol
    try:
        execute(plan.method, data, plan.model, backend=where.how, protocol=base, **federation)
    except Diverged:
        return None
    except CoterieError as error:
        return str(error)
    return None


def search(
    job: BoardJob,
    setup: TrialSetup,
    tried: list[Candidate],
    folder: BoardFolder,
    where: BoardCircumstances,
    watching: Watching,
) -> dict[str, Any]:
    """Train all candidates, resumed where they were interrupted. Raises Diverged if none can be trained."""
    seed, metric = job.rules.tuning_seed, setup.data.task.metric.scale
    place = (
        folder.folder
        / SEARCHES
        / str(FileKey(job.benchmark.id, job.method, None).path.with_suffix("")).replace("/", "-")
    )
    kept = Trials(place)
    with begun(place, about(setup, seed) | {"candidates": tried}, {}):
        known = kept.load()
        left = None if where.deadline is None else max(where.deadline - time.time(), 1e-3)
        spent = sum(trial.seconds for trial in known)
        strategy = Stages(
            tried, [Stage(len(tried), setup.rounds)], [seed], SearchBudget(None, left and spent + left), metric
        )
        strategy.know(known, kept.settings)
        do_trials(strategy, setup, kept, watching)
        standings = ranked(strategy)
        if len(standings) < len(tried):
            raise OutOfTime(f"{len(standings)} of {len(tried)} trials done")
    shutil.rmtree(place, ignore_errors=True)
    if standings[0].failed:
        raise Diverged(f"training failed with all {len(tried)} settings: {standings[0].failed}")
    return {
        "settings": best_of(standings, strategy).settings,
        "measured": POINTS[setup.point],
        "metric": metric._asdict(),
        "standings": [standing.as_dict() for standing in standings],
    }


def train_seed(
    job: BoardJob,
    seed: int,
    settings: Candidate,
    folder: BoardFolder,
    where: BoardCircumstances,
    watching: Watching,
) -> None:
    """Train the chosen settings on all training samples, and write the scores on the test samples."""
    start, plan = time.monotonic(), job.benchmark.plan(job.method, settings)
    data = job.data(seed, where.data_dir)
    federation, base = asdict(replace(plan.federation, seed=seed)), job.benchmark.recipe.protocol
    content = job.header(seed) | {"settings": settings, "failed": None}
    try:
        with watching(f"{job.title} seed {seed}", plan.federation.rounds) as watch:
            result = execute(
                plan.method, data, plan.model, backend=where.how, watch=watch, protocol=base,
                interrupted=lambda: int(where.late()), **federation,
            )  # fmt: skip
        ended = result.history.ended
        if ended is not None and ended.reason == INTERRUPTED:
            raise OutOfTime(f"seed {seed} was not finished")
        content |= measured(job.method, result)
    except Diverged as error:
        content["failed"] = str(error)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    content |= {
        "partition": data.partition and data.partition.hash,
        **{name: plan.settings[name] for name in ("model", "federation")},
        "trained": plan.settings["method"],  # all its settings, with the defaults
        "seconds": round(time.monotonic() - start, 2),
        **where.provenance,
    }
    folder.add(FileKey(job.benchmark.id, job.method, seed), content)


def measured(method: str, result: Result) -> dict[str, Any]:
    """Scores of all clients at the point that the method reports, calibration error, and cost."""
    called, history = title(method), result.history
    results = result.method.results
    point = results.get(called) or next(iter(results.values()))
    last = list(history.with_point(point))[-1]
    scores = last.scores[point, "test"]
    values = [last.metric.stored(value) for value in scores.value[scores.defined].tolist()]
    return {
        "metric": last.metric._asdict(),
        "measured": POINTS[point],
        "scores": values,
        "calibration": calibration(result, point, sum(values) / len(values)),
        "bytes_up": sum(record.bytes_up for record in history),
        "bytes_down": sum(record.bytes_down for record in history),
        "left_out": sum(len(record.left_out) for record in history),
    }


def calibration(result: Result, point: str, score: float) -> float | None:
    """The expected calibration error, mean over clients, of the models whose mean score at this point this is.

    None: the task has none, or those are not the models that the run keeps, which are the ones that are measured.
    """
    found = result.finals.summary() if result.finals else {}
    finished = any(result.history.with_point("finished"))
    model = reported_model(found, result.metric.name, point, score, finished)
    error = found[model].get("calibration_error", {}).get("mean") if model else None
    return None if error is None else round(error, 6)
