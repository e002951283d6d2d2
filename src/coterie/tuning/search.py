"""A whole search: data without test samples, candidates, trials, the choice, and one final test."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.analysis.lookup import described
from coterie.api import About, Execution, choose, execute, fingerprint, load_clients, make_method, method_name
from coterie.api.arguments import check_arguments
from coterie.api.comparing import seeds_from
from coterie.api.progress import Watching, unwatched
from coterie.api.variations import Candidate, shown
from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.data.gather import folded
from coterie.federation.history import POINTS
from coterie.methods import VARIANTS
from coterie.runs.checkpoint_files import checksum
from coterie.runs.describe import described_task
from coterie.runs.disk import check_tree, lock, read_inside, whole, writing
from coterie.runs.finding import discard_unstarted, is_complete, new_folder, open_run
from coterie.runs.matching import dotted, same
from coterie.runs.stopping import Stopped, stoppable
from coterie.tuning.adaptive import Adaptive, optuna_version
from coterie.tuning.space import ADAPTIVE, TRIALS, candidates, check_search, corners, read_space
from coterie.tuning.standings import Standing, Tuned, ranked, untried
from coterie.tuning.strategy import Job, SearchBudget, SearchStrategy, Stage, Stages, Trial, halving
from coterie.tuning.trials import Trials, TrialSetup, train, without_test

VALIDATION = 0.2  # share of each client's training samples


def tune(
    method: str | AnyMethod,
    over: Mapping[str, Any],
    data: FederatedData | None = None,
    model: str | nn.Module | Model | None = None,
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
    backend: Execution | str = "auto",
    out: str | Path | None = None,
    head: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    train_only: str | None = None,
    protocol: str = "pac",
    watching: Watching = unwatched,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Tuned:
    """Search the settings of a method by its score on validation samples; test samples are not used to choose.

    Parameters
    ----------
    method: a name or a method.
    over: setting -> values to try, as a list or as text "0.1,1,10"; for all searches but grid also a range, as
        "0.001..0.1".
    search: "grid" (all combinations), "random", "halving" (successive halving), or, with the extra `coterie[tune]`,
        "tpe" (Optuna's TPE proposes each setting from the scores so far) and "asha" (TPE, and settings that are not
        among the best 1/eta so far stop early).
    trials: settings to try; default: 16 where they are drawn.
    search_seed: seed of the proposals. The same seed gives the same candidates.
    eta: halving and asha continue the best 1/eta.
    seeds: trainings of each setting.
    validation: share of each client's training samples to set aside, unless the data has validation samples.
    budget_rounds, budget_minutes: limits for all trials together.
    final: run the best setting on all training samples, and measure it once on the test samples.
    out: folder of the search. If it exists, the search is resumed.
    data, model, backend, head, model_args, train_only, protocol, settings: as for `coterie.run`.

    Returns
    -------
    Tuned: `.best`, `.standings`, `.test`, `.table()`.

    Examples
    --------
    >>> tuned = coterie.tune("fedpac", {"align": [0.1, 1, 10], "lr": [0.01, 0.1]}, data)  # doctest: +SKIP
    >>> tuned.best  # doctest: +SKIP
    {'align': 1.0, 'lr': 0.01}
    """
    if not isinstance(over, Mapping):
        raise CoterieError("over is a dictionary from settings to the values to try, such as {'lr': [0.01, 0.1]}")
    check_arguments(method, data, model)
    data = data if data is not None else load_clients(protocol=protocol)
    first = settings.pop("seed", 0)
    searched = without_test(data, validation, settings.get("new_clients", 0.0), first)
    setup = make_setup(method, model, head, searched, protocol, settings, backend, model_args or {}, train_only)
    kind = type(make_method(setup.method)) if isinstance(setup.method, str) else type(setup.method)
    space = read_space(setup.title, kind, over)
    check_search(search, trials)
    tried = corners(space) if search in ADAPTIVE else candidates(space, search, trials, search_seed)
    check(setup, tried)
    limits = seeds_from(first, seeds), budget(budget_rounds, budget_minutes)
    metric = data.task.metric.scale
    strategy: SearchStrategy
    if search in ADAPTIVE:
        halved = eta if search == "asha" else None
        strategy = Adaptive(space, trials or TRIALS, setup.rounds, *limits, seed=search_seed, eta=halved, metric=metric)
    else:
        stages = [Stage(len(tried), setup.rounds)]
        stages = halving(len(tried), setup.rounds, eta) if search == "halving" else stages
        strategy = Stages(tried, stages, *limits, metric)
    question = about(setup, first) | {"over": space, "search": search, "trials": trials, "search seed": search_seed}
    question |= {"eta": eta, "seed": first, "seeds": seeds, "validation": validation}
    question |= {"optuna": optuna_version()} if search in ADAPTIVE else {}  # proposals depend on the version
    folder = Path(out) if out is not None else new_folder(f"{named(setup)}-{data.name}-tuned")
    with begun(folder, question, config or {}):
        kept = Trials(folder)
        strategy.know(kept.load(), kept.settings)
        try:
            do_trials(strategy, setup, kept, watching)
            standings = ranked(strategy)
            best = best_of(standings, strategy)
            place = folder / f"best-{best.number:04}"
            test = last_run(setup, best.settings, place, data, first, watching, config or {}) if final else None
        except KeyboardInterrupt as stop:
            again = f"`coterie tune --resume {folder}`" if config else f"coterie.tune with out='{folder}'"
            raise Stopped(f"stopped; {again} resumes it", getattr(stop, "signal", signal.SIGINT)) from None
        share = validation if data.validation is None else None
        left = untried(strategy)
        tuned = Tuned(
            setup.title, data.name, data.num_clients, setup.point, share, strategy.seeds, standings, left, folder, test,
            metric,
        )  # fmt: skip
        write(folder / "tuned.json", tuned.as_dict())
    return tuned


def make_setup(
    method: str | AnyMethod,
    model: str | nn.Module | Model | None,
    head: str | None,
    data: FederatedData,
    protocol: str,
    settings: Mapping[str, Any],
    backend: Execution | str,
    model_args: Mapping[str, Any],
    train_only: str | None,
) -> TrialSetup:
    named = method_name(method) if isinstance(method, str) else method
    made, federation, _, usual_model = choose(named, protocol, About(data.name, data.shape, data.num_clients), settings)
    title = VARIANTS[named][2] if isinstance(named, str) and named in VARIANTS else made.title
    point = made.results.get(title) or next(iter(made.results.values()))
    network = model if model is not None else usual_model
    how = backend if isinstance(backend, Execution) else Execution(backend=backend)
    about_data = (data, protocol, settings, federation.rounds, how)
    return TrialSetup(named, title, point, network, head, *about_data, model_args, train_only)


def check(setup: TrialSetup, tried: Sequence[Candidate]) -> None:
    """Raise for invalid settings before any training."""
    for name in setup.settings:
        if name in tried[0]:
            raise CoterieError(f"{name} is both set and searched; remove one of the two")
    for candidate in tried:
        try:
            setup.chosen(candidate)
        except CoterieError as error:
            raise CoterieError(f"{shown(candidate)}: {error}") from None


def budget(rounds: int | None, minutes: float | None) -> SearchBudget:
    for name, value in (("rounds", rounds), ("minutes", minutes)):
        if value is not None and not value > 0:
            raise CoterieError(f"the budget must be positive, got {value} {name}")
    return SearchBudget(rounds, None if minutes is None else 60 * minutes)


def about(setup: TrialSetup, seed: int) -> dict[str, Any]:
    """Everything that the scores of a search depend on, besides the searched settings."""
    return {
        "method": setup.method if isinstance(setup.method, str) else described(setup.method),
        "protocol": setup.protocol,
        "rounds": setup.rounds,
        "settings": setup.settings,
        "data": fingerprint(setup.data),
        "task": described_task(setup.data.task),
        "model": checksum(tree.flatten(setup.network(seed).start), {}),
        "precision": setup.how.precision,
    }


def named(setup: TrialSetup) -> str:
    return setup.method if isinstance(setup.method, str) else setup.title


@contextmanager
def begun(folder: Path, question: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
    """Create or check the folder of a search, and lock it."""
    path = folder / "search.json"
    current = {name: json.dumps(value, default=str) for name, value in dotted(question)}
    if folder.is_dir():
        check_tree(folder)
    if path.exists():
        same(read_search(folder)["question"], current, "search")
    elif folder.exists() and any(folder.iterdir()):
        raise CoterieError(f"{folder} exists and is not the folder of a search; choose another --out")
    else:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write(path, {"question": current, **config})
    with lock(path):
        yield


def read_search(folder: Path) -> dict[str, Any]:
    """search.json of a folder: the question, and the command."""
    try:
        content: Any = json.loads(read_inside(folder, "search.json"))
    except FileNotFoundError:
        raise CoterieError(f"{folder} is not the folder of a search: it has no search.json") from None
    except (OSError, ValueError) as error:
        raise CoterieError(f"cannot read {folder / 'search.json'}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("question"), dict):
        raise CoterieError(f"{folder / 'search.json'} is damaged: 'question' is missing or not a mapping")
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    with writing(path.parent), whole(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def do_trials(strategy: SearchStrategy, setup: TrialSetup, kept: Trials, watching: Watching) -> None:
    """Run the trials that are not done yet."""
    with stoppable() as stop_signal:

        def work(job: Job) -> Trial:
            if stop := stop_signal():
                raise Stopped(by=stop)
            since, settings = strategy.reached().get((job.candidate, job.seed), 0), strategy.candidates[job.candidate]
            trial = train(setup, settings, job, since, kept.checkpoint(job), watching, stop_signal, strategy.late)
            kept.add(trial, settings)
            if trial.failed or job.rounds == setup.rounds:
                kept.forget(job.candidate, job.seed)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return trial

        strategy.run(work, kept.forget)
        if stop := stop_signal():
            raise Stopped(by=stop)


def best_of(standings: Sequence[Standing], strategy: SearchStrategy) -> Standing:
    if not standings:
        needed = strategy.stages[0].rounds * len(strategy.seeds)
        raise CoterieError(f"the budget ended before one setting was measured; one takes {needed} rounds")
    if standings[0].failed:
        raise CoterieError(f"training failed with every setting: {standings[0].failed}")
    return standings[0]


def last_run(
    setup: TrialSetup,
    best: Candidate,
    out: Path,
    data: FederatedData,
    seed: int,
    watching: Watching,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Train the best setting on all training samples and measure it once on the test samples."""
    if not is_complete(out):
        discard_unstarted(out)
        command = {"command": {**config["command"], **best, "seed": seed}} if "command" in config else {}
        with watching(f"{setup.title} {shown(best)}, all training samples", setup.rounds) as watch:
            try:
                execute(
                    setup.method, folded(data), setup.model, backend=setup.how, out=out, resume=out.exists(),
                    watch=watch, head=setup.head, model_args=setup.model_args, train_only=setup.train_only,
                    protocol=setup.protocol, config=command, **{**setup.settings, **best, "seed": seed},
                )  # fmt: skip
            except CoterieError as error:
                raise CoterieError(f"the search is done, but the run of the best setting failed: {error}") from None
    outcomes = (open_run(out).result or {})["outcomes"]
    found: dict[str, Any] = next(o["last"] for o in outcomes if o["measured"] == POINTS[setup.point])
    return {**found, "folder": str(out)}
