"""Runs the cells of a leaderboard that have no files yet, one after the other or several at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from coterie.analysis.outcomes import title
from coterie.api import Execution, execute, ready
from coterie.api.progress import Watching
from coterie.core.errors import CoterieError
from coterie.papers.leaderboard.cells import BoardCircumstances, BoardJob, run_cell
from coterie.papers.leaderboard.files import BoardFolder, Contents, FileKey
from coterie.papers.leaderboard.rules import Benchmark, BoardRules
from coterie.papers.reproduce import OVER, duration, missing_data, one_by_one, timely
from coterie.runs.jobs import JobSpec, side_by_side


def jobs_left(
    rules: BoardRules,
    benchmarks: Sequence[Benchmark],
    methods: Sequence[str],
    seeds: Sequence[int],
    found: Contents,
) -> list[BoardJob]:
    """Cells with something to do: benchmark by benchmark, in the order of the rules."""
    jobs = []
    for benchmark in benchmarks:
        for method in methods:
            tuning = found.get(FileKey(benchmark.id, method, None))
            left = tuple(seed for seed in seeds if FileKey(benchmark.id, method, seed) not in found)
            withdrawn = tuning is not None and (tuning.get("refused") or tuning.get("failed"))
            if left and not withdrawn:
                jobs.append(BoardJob(rules, benchmark, method, tuning, left))
    return jobs


def run_board(
    jobs: Sequence[BoardJob],
    folder: BoardFolder,
    *,
    how: Execution,
    data_dir: str | None,
    commit: str | None,
    watching: Watching,
    at_once: int = 1,
    max_seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Run these cells, and return what failed; a failure does not stop the others.

    at_once: cells that run side by side. max_seconds: what is not finished then is left for the next call.
    """
    start = time.time()
    if at_once < 1:
        raise CoterieError(f"--jobs must be at least 1, got {at_once}")
    if at_once > 1 and how.backend == "ray":
        raise CoterieError("--jobs and --backend ray cannot be combined: a cluster runs the clients of one training")
    for job in jobs:
        job.rules.candidates(job.benchmark, job.method)  # fail early
    folder.make()
    if not jobs:
        return []
    ready(how)
    missing = missing_data({job.benchmark.recipe.dataset for job in jobs}, data_dir)
    able = [job for job in jobs if job.benchmark.recipe.dataset not in missing]
    at_once = max(min(at_once, len(able)), 1)
    deadline = None if max_seconds is None else start + max_seconds
    where = BoardCircumstances(how, data_dir, commit, at_once, deadline)
    say(forecast(able, where, max_seconds))
    if at_once == 1:
        work = partial(run_cell, folder=folder, where=where, watching=watching)
        failures = one_by_one(able, partial(timely, work))
    else:
        specs = [JobSpec(job.title, job) for job in able]
        failures = side_by_side(specs, partial(timely, partial(run_cell, folder=folder, where=where)), at_once, say)
    if where.late():
        say(f"{OVER}; the same command continues")
    return [*missing.values(), *failures]


def forecast(jobs: Sequence[BoardJob], where: BoardCircumstances, max_seconds: float | None) -> str:
    """What will be run, and about how long it takes here, by the second of two rounds on each dataset."""
    tunings = sum(job.tuning is None for job in jobs)
    trainings = sum(len(job.seeds) for job in jobs)
    trials = jobs[0].rules.trials
    benchmarks = list(dict.fromkeys(job.benchmark.id for job in jobs))
    methods = list(dict.fromkeys(title(job.method) for job in jobs))
    needed = (
        f"To run: {', '.join(methods)} on {', '.join(benchmarks)}: {tunings} tunings of {trials} settings each, and "
        f"{trainings} trainings"
    )
    limit = "" if max_seconds is None else f"; --max-time ends this call after {duration(max_seconds)}"
    paces: dict[tuple[str, str], float] = {}
    for job in jobs:
        at = job.benchmark.recipe.dataset, job.benchmark.recipe.model
        if at not in paces:
            try:
                paces[at] = pace(job, where)
            except CoterieError as error:  # recorded when its turn comes
                return f"{needed}; the time is unknown: {job.title} failed in a trial ({error}){limit}"
    total = sum(paces[job.benchmark.recipe.dataset, job.benchmark.recipe.model] * job.work for job in jobs)
    side = f" / {where.jobs} side by side" if where.jobs > 1 else ""
    return f"{needed}: about {duration(total)} one after the other{side}{limit}"


def pace(job: BoardJob, where: BoardCircumstances) -> float:
    """Seconds per local step, on the data of the tuning."""
    plan, seed = job.benchmark.plan(job.method, {}), job.rules.tuning_seed
    federation = asdict(replace(plan.federation, rounds=2, evaluate_every=2, seed=seed))
    data, base = job.data(seed, where.data_dir), job.benchmark.recipe.protocol
    result = execute(plan.method, data, plan.model, backend=where.how, protocol=base, **federation)
    seconds = result.history[1].seconds
    return (seconds.get("train", 0.0) + seconds.get("receive", 0.0)) * plan.federation.rounds / plan.work
