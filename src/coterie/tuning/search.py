"""A search from its question to its answer: data without test samples, candidates, trials, the choice, one test."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.api import Execution, choose, fingerprint, load_clients, make_method, method_name, run
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.samples import FederatedData
from coterie.data.gather import folded, set_aside
from coterie.federation.checkpoint import checksum, dotted, same
from coterie.federation.disk import lock, whole
from coterie.federation.history import POINTS
from coterie.federation.newcomers import keep_out
from coterie.federation.stopping import Stopped, stoppable
from coterie.methods import VARIANTS
from coterie.tuning.schedule import Budget, Job, Ladder, Rung, Trial, halving
from coterie.tuning.space import Candidate, candidates, read_space, shown
from coterie.tuning.standings import Standing, Tuned, ranked, untried
from coterie.tuning.trials import Task, Trials, Watching, train, writing

VALIDATION = 0.2  # of everybody's training samples


def tune(
    method: str,
    over: Mapping[str, Any],
    model: str | nn.Module | Model | None = None,
    clients: FederatedData | None = None,
    *,
    search: str = "grid",
    trials: int | None = None,
    search_seed: int = 0,
    eta: int = 3,
    seeds: int = 1,
    validation: float = VALIDATION,
    budget_rounds: int | None = None,
    budget_minutes: float | None = None,
    final: bool = True,
    where: Execution | str = "auto",
    out: str | Path | None = None,
    head: str | None = None,
    protocol: str = "pac",
    watching: Watching = lambda title, rounds: nullcontext(lambda record: None),
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Tuned:
    """Try settings, and choose the best by accuracy on validation samples; the test samples have no part in it.

    over: setting -> values to try, as a list or as in "0.1,1,10"; for random ones a range, as "0.001..0.1". search:
    grid, random or halving. validation: share of everybody's training samples to set aside, unless the clients come
    with validation samples. seeds: trainings of each setting. final: one run of the best setting, on all training
    samples, measured on the test samples. out: the folder of the search; if it is there, the search goes on. model,
    clients, where, head, protocol and settings: as for coterie.run.
    """
    data = clients if clients is not None else load_clients(protocol=protocol)
    first = settings.pop("seed", 0)
    searched = without_test(data, validation, settings.get("new_clients", 0.0), first)
    task = make_task(method, model, head, searched, protocol, settings, where)
    space = read_space(task.title, type(make_method(task.method)), over)
    tried = candidates(space, search, trials, search_seed)
    check(task, tried)
    rungs = [Rung(len(tried), task.rounds)] if search != "halving" else halving(len(tried), task.rounds, eta)
    ladder = Ladder(rungs, seeds_from(first, seeds), budget(budget_rounds, budget_minutes))
    question = about(task, first) | {"over": space, "search": search, "trials": trials, "search seed": search_seed}
    question |= {"eta": eta, "seed": first, "seeds": seeds, "validation": validation}
    folder = Path(out) if out is not None else default_folder(task.method, data.name)
    with begun(folder, question, config or {}):
        kept = Trials(folder, tried)
        ladder.know(kept.load())
        try:
            climb(ladder, task, kept, watching)
            standings = ranked(ladder, tried)
            best = best_of(standings, ladder)
            place = folder / f"best-{best.number:04}"
            test = last_run(task, best.settings, place, data, first, watching, config or {}) if final else None
        except KeyboardInterrupt as stop:
            again = f"`coterie tune --resume {folder}`" if config else f"coterie.tune with out='{folder}'"
            said = f"stopped; {again} goes on"
            raise Stopped(said, stop.signal) if isinstance(stop, Stopped) else KeyboardInterrupt(said) from None
        share = validation if data.validation is None else None
        left = untried(ladder, tried)
        tuned = Tuned(
            task.title, data.name, data.clients, task.point, share, ladder.seeds, standings, left, folder, test
        )
        write(folder / "tuned.json", tuned.told())
    return tuned


def without_test(data: FederatedData, share: float, new_clients: float, seed: int) -> FederatedData:
    """For the search: the validation samples stand where test samples are, and there are no others.

    Clients that the last run will meet as new ones have no part either.
    """
    split = set_aside(data, share) if data.validation is None else data
    assert split.validation is not None
    if not sum(split.validation.sizes):
        raise CoterieError("no client has two different training samples, so none can be set aside for validation")
    searched = replace(split, test=split.validation, validation=None)
    return keep_out(searched, new_clients, seed)[0] if new_clients else searched


def make_task(
    method: str,
    model: str | nn.Module | Model | None,
    head: str | None,
    data: FederatedData,
    protocol: str,
    settings: Mapping[str, Any],
    where: Execution | str,
) -> Task:
    name = method_name(method)
    made, federation, _, usual_model = choose(name, protocol, data.name, data.shape, settings)
    title = VARIANTS[name][2] if name in VARIANTS else made.title
    point = made.results.get(title) or next(iter(made.results.values()))
    network = model if model is not None else usual_model
    how = where if isinstance(where, Execution) else Execution(clients=where)
    return Task(name, title, point, network, head, data, protocol, settings, federation.rounds, how)


def check(task: Task, tried: Sequence[Candidate]) -> None:
    """Everything that is wrong with a setting is said before one is trained."""
    for name in task.settings:
        if name in tried[0]:
            raise CoterieError(f"{name} is both set and searched; leave one of them out")
    for candidate in tried:
        try:
            task.chosen(candidate)
        except CoterieError as error:
            raise CoterieError(f"{shown(candidate)}: {error}") from None


def seeds_from(first: int, seeds: int) -> range:
    if seeds < 1:
        raise CoterieError(f"seeds must be at least 1, not {seeds}")
    return range(first, first + seeds)


def budget(rounds: int | None, minutes: float | None) -> Budget:
    for name, value in (("rounds", rounds), ("minutes", minutes)):
        if value is not None and not value > 0:
            raise CoterieError(f"a budget of {value} {name} allows nothing")
    return Budget(rounds, None if minutes is None else 60 * minutes)


def about(task: Task, seed: int) -> dict[str, Any]:
    """What decides about the numbers of a search, beside what is searched."""
    return {
        "method": task.method,
        "protocol": task.protocol,
        "rounds": task.rounds,
        "settings": task.settings,
        "data": fingerprint(task.data),
        "model": checksum(tree.flatten(task.network(seed).start), {}),
        "precision": task.how.precision,
    }


def default_folder(method: str, data: str) -> Path:
    return Path("runs") / f"tune-{time.strftime('%Y%m%d-%H%M%S')}-{method}-{data}"


@contextmanager
def begun(folder: Path, question: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
    """The folder, of this search and for this process only."""
    path = folder / "search.json"
    asked = {name: json.dumps(value, default=str) for name, value in dotted(question)}
    if path.exists():
        same(read_search(folder)["question"], asked, "search")
    elif folder.exists() and any(folder.iterdir()):
        raise CoterieError(f"{folder} is there, and is not the folder of a search; name another with --out")
    else:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write(path, {"question": asked, **config})
    with lock(path):
        yield


def read_search(folder: Path) -> dict[str, Any]:
    """What the search in this folder was asked."""
    try:
        told = json.loads((folder / "search.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CoterieError(f"{folder} is not the folder of a search: it has no search.json") from None
    except (OSError, ValueError) as error:
        raise CoterieError(f"{folder / 'search.json'} cannot be read: {error}") from None
    if not isinstance(told, dict) or not isinstance(told.get("question"), dict):
        raise CoterieError(f"{folder / 'search.json'} does not say what was searched")
    return told


def write(path: Path, content: Mapping[str, Any]) -> None:
    with writing(path.parent), whole(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def climb(ladder: Ladder, task: Task, kept: Trials, watching: Watching) -> None:
    """Do the trials that are not there yet."""
    with stoppable() as asked:

        def work(job: Job) -> Trial:
            if stop := asked():
                raise Stopped(by=stop)
            since = ladder.reached().get((job.candidate, job.seed), 0)
            trial = train(
                task, kept.candidates[job.candidate], job, since, kept.checkpoint(job), watching, asked, ladder.late
            )
            kept.add(trial)
            if trial.failed or job.rounds == task.rounds:
                kept.forget(job.candidate, job.seed)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return trial

        ladder.climb(work, kept.forget)
        if stop := asked():
            raise Stopped(by=stop)


def best_of(standings: Sequence[Standing], ladder: Ladder) -> Standing:
    if not standings:
        needed = ladder.rungs[0].rounds * len(ladder.seeds)
        raise CoterieError(f"the budget ended before one setting was measured; for rounds, one takes {needed}")
    if standings[0].failed:
        raise CoterieError(f"training failed with every setting that was tried: {standings[0].failed}")
    return standings[0]


def last_run(
    task: Task,
    best: Candidate,
    out: Path,
    data: FederatedData,
    seed: int,
    watching: Watching,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """The best setting on all training samples, measured on the test samples; nothing is decided after this."""
    if not (out / "result.json").exists():
        if not (out / "config.json").exists():
            shutil.rmtree(out, ignore_errors=True)  # killed when it had just made its folder
        told = {"command": {**config["command"], **best, "seed": seed}} if "command" in config else {}
        with watching(f"{task.title} {shown(best)}, all training samples", task.rounds) as watch:
            try:
                run(
                    task.method, task.model, folded(data), where=task.how, out=out, resume=out.exists(), watch=watch,
                    head=task.head, protocol=task.protocol, config=told, **{**task.settings, **best, "seed": seed},
                )  # fmt: skip
            except CoterieError as error:
                raise CoterieError(f"the search is done, but not the run of the best setting: {error}") from None
    outcomes = json.loads((out / "result.json").read_text(encoding="utf-8"))["outcomes"]
    found: dict[str, Any] = next(o["last"] for o in outcomes if o["measured"] == POINTS[task.point])
    return {**found, "folder": str(out)}
