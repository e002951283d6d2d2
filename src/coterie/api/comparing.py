"""`coterie.compare`: several methods on the same data, each with several seeds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from coterie.analysis.comparison import Comparison
from coterie.analysis.outcomes import label, rows_of
from coterie.analysis.plots import Curve
from coterie.api.arguments import check_arguments
from coterie.api.comparison_folder import as_table, is_begun, read_finished, write_outcomes
from coterie.api.data import load_clients
from coterie.api.entrants import Entrant, check_fixed, check_protection, entrants, reference_of, trainings
from coterie.api.existing import check_free, check_members, prepared
from coterie.api.interrupting import INTERRUPTED, OF_A_COMPARISON, Interrupted, interruptible
from coterie.api.progress import progress_bar
from coterie.api.result import Result
from coterie.api.running import execute
from coterie.api.settings import GROUPS, check_internal, merged, names
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.execution.choice import Execution
from coterie.federation import Ending
from coterie.report.final_metrics import scales_of
from coterie.report.naming import dataset, entries, settings_text, start
from coterie.report.sections.summary import outcome, reference, same_data
from coterie.runs.extending import remains
from coterie.runs.finding import is_complete, open_runs
from coterie.runs.stopping import Stopped

log = logging.getLogger("coterie")


class Trainings(NamedTuple):
    """The outcomes of the runs of a comparison."""

    rows: list[dict[str, Any]]  # one for each number that a run reports
    curves: dict[str, list[Curve]]  # method -> scores over rounds, for each seed
    refused: dict[str, str]  # method of `all` that was left out -> reason


Train = Callable[[Entrant, int, Path | None, bool], Result]  # of a method, a seed, a folder, and whether to resume it


def compare(
    methods: Sequence[str | AnyMethod] | Mapping[str, str | AnyMethod],
    data: FederatedData | Callable[[int], FederatedData] | None = None,
    model: str | nn.Module | Model | None = None,
    *,
    seeds: int = 5,
    seed: int = 0,
    against: str | None = None,
    over: Mapping[str, Sequence[Any] | str] | None = None,
    out: str | Path | None = None,
    exist: str = "error",
    progress: bool = True,
    protocol: str = "pac",
    head: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    train_only: str | None = None,
    backend: Execution | str = "auto",
    **settings: Any,
) -> Comparison:
    """Train several methods on the same data with several seeds, and compare them.

    Ctrl-C ends the comparison: without `out` it has the runs that were finished, and raises KeyboardInterrupt if there
    are none; with `out` it can be resumed.

    Parameters
    ----------
    methods: names or Method objects, or a dict that maps names for the tables to them. FedAvg also reports FedAvg-FT.
        ["all"]: every method, FedAvg last; those that refuse the data or the network are left out, with a warning.
    data: the clients' samples, or a function from a seed to samples, which gives each seed its own partition.
        Default: the shipped Fashion-MNIST subset.
    model: as for `coterie.run`.
    seeds: runs of each method, with seeds `seed`, `seed` + 1, ...
    seed: the first seed.
    against: the method that the others are tested against. Default: the best by the metric.
    over: settings to vary, such as {"lr": [0.01, 0.1]}: every combination is an entry of the table, such as
        "FedAvg, lr 0.01". A setting that only some methods have varies for those.
    out: a new folder for the runs, one folder each, which `coterie report` and `coterie table` read.
    exist: what to do where `out` exists: "error"; "resume": read its finished runs if their settings are the same,
        continue those that were stopped, and run those that are missing; "replace": train again, and replace it at the
        end. Only folders of comparisons and runs are ever replaced.
    progress: show a progress bar, in terminals and notebooks only.
    protocol, head, model_args, train_only, backend, settings: as for `coterie.run`; they hold for all methods. Set
        hyper-parameters of one method in the method, such as coterie.FedPAC(align=0.5).

    Returns
    -------
    Comparison: `.table()`, `.significance()`, `.to_latex()`, `.plot()`.

    Examples
    --------
    >>> import coterie
    >>> data = coterie.load_clients(num_clients=4, local_size=40, test_size=20)
    >>> found = coterie.compare(["local", "fedavg"], data, "linear", seeds=2, rounds=1, progress=False)
    >>> found.methods
    ['Local', 'FedAvg', 'FedAvg-FT']
    """
    listed = entrants(methods, over)
    check_arguments(listed[0].method, None if callable(data) else data, model)
    check_internal(settings)
    taken, tested = trainings(listed), reference_of(listed, against)
    groups = {name: value for name, value in settings.items() if name in GROUPS}
    chosen = merged(groups, {name: value for name, value in settings.items() if name not in GROUPS})
    check_fixed(listed, chosen)
    check_protection(taken, protocol, chosen)
    check_free(out, exist)
    fixed = load_clients(protocol=protocol) if data is None else None if callable(data) else data

    def data_of(seed: int) -> FederatedData:
        return fixed if fixed is not None else data(seed)  # type: ignore[misc,operator]

    def train(entrant: Entrant, seed: int, folder: Path | None, resume: bool) -> Result:
        def watching(_: str, rounds: int) -> Any:
            shown = progress and not (folder is not None and is_complete(folder) and resume)
            return progress_bar(f"{entrant.title}, seed {seed}", rounds) if shown else nullcontext(lambda record: None)

        return execute(
            entrant.method,
            data_of(seed),
            model,
            backend=backend,
            out=folder,
            resume=resume,
            watching=watching,
            head=head,
            model_args=model_args,
            train_only=train_only,
            protocol=protocol,
            interrupted=interrupted,
            seed=seed,
            **chosen | dict(entrant.settings),
        )

    numbers, first = seeds_from(seed, seeds), data_of(seed)
    with (
        prepared(out, exist, chosen.get("track", ())) as place,
        interruptible(out is None, OF_A_COMPARISON) as interrupted,
    ):
        base = place.folder

        def folder_of(entrant: Entrant, seed: int) -> Path | None:
            return base and base / f"{entrant.name}-seed{seed}"

        if base is not None:
            check_members(base, [base / f"{entrant.name}-seed{number}" for entrant in taken for number in numbers])
        try:
            found = train_all(taken, numbers, train, folder_of, chosen, interrupted, verify=True)
        except Stopped as stop:  # by Ctrl-C, with a folder
            again = f"the same call with out='{base}' and exist='resume' continues it"
            raise Stopped(f"the comparison was stopped; {again}", stop.signal) from None
        if base is not None:
            write_outcomes(base, as_table(found.rows, first, str(out), found.refused))
    return as_comparison(found, first, tested)


def seeds_from(first: int, count: int) -> range:
    if count < 1:
        raise CoterieError(f"seeds must be at least 1, got {count}")
    return range(first, first + count)


def train_all(
    taken: Sequence[Entrant],
    seeds: Sequence[int],
    train: Train,
    folder_of: Callable[[Entrant, int], Path | None],
    settings: Mapping[str, Any],
    interrupted: Interrupted = lambda: 0,
    verify: bool = False,
) -> Trainings:
    """Every method with every seed. Runs that are finished in their folder are read; others are trained or resumed.

    verify: check that finished runs have these settings; not needed where the settings come from their folder.
    """
    found = Trainings([], {}, {})
    ending = Ending(**{name: value for name, value in settings.items() if name in names(Ending)})
    runs, done = list(product(taken, seeds)), 0
    for entrant, seed in runs:
        if interrupted():
            break
        out, start = folder_of(entrant, seed), time.monotonic()
        if out and is_complete(out) and not remains(out, settings.get("rounds"), ending):
            if verify:
                train(entrant, seed, out, True)  # which trains nothing
            history, outcomes, seconds, privacy, content, finals = read_finished(out)
        else:
            try:
                result = train(entrant, seed, out, out is not None and is_begun(out))
            except CoterieError as error:
                if not entrant.optional:
                    raise
                log.warning("%s is left out: %s", entrant.title, error)
                found.refused[entrant.title] = str(error)
                continue
            if result.ended and result.ended.reason == INTERRUPTED:
                break
            history, outcomes, privacy = result.history, result.outcomes(), result.privacy
            seconds, content = time.monotonic() - start, str((result.config or {})["data"]["content"])
            finals = result.finals.summary() if result.finals else None
        labels = {o.name: f"{label(entrant.method, o.name, entrant.called)}{entrant.detail}" for o in outcomes}
        found.rows.extend(rows_of(labels, seed, history, outcomes, seconds, privacy, content, finals))
        for o in outcomes:
            name = labels[o.name]
            found.curves.setdefault(name, []).append(history.curve(o.point))
        done += 1
    if not done and found.refused and not interrupted():
        raise CoterieError("every method refuses these data, this network or these settings; the warnings say why")
    if not done:
        log.warning(
            "interrupted: none of the %d runs was finished, so nothing is kept; with `out`, it could be resumed",
            len(runs),
        )
        raise KeyboardInterrupt
    if done + len(found.refused) * len(seeds) < len(runs):
        log.warning("interrupted: the comparison has %d of %d runs, those that were finished", done, len(runs))
    return found


def as_comparison(found: Trainings, data: FederatedData, against: str | None) -> Comparison:
    task = data.task
    others = [metric.scale for metric in task.metrics]
    return Comparison(found.rows, data.name, data.num_clients, against, found.curves, task.metric.scale, others)


def load_comparison(*runs: str | Path | Sequence[str | Path]) -> Comparison:
    """Compare finished runs, given by their folders or by folders of runs such as those of `coterie compare`.

    All runs must have the same data, or partitions drawn by the same rule. Several comparisons are taken together, such
    as seeds that were run on two machines: a method has the seeds of all folders, each of them once.

    runs: folders, or lists of folders.

    >>> coterie.load_comparison("runs/seeds-0-to-4", "runs/seeds-5-to-9").table()  # doctest: +SKIP
    """
    paths = [path for given in runs for path in ([given] if isinstance(given, str | Path) else given)]
    read = open_runs(paths)
    for run in read:
        if run.result is None:
            raise CoterieError(f"{run.folder} is not finished; `coterie resume {run.folder}` continues it")
    groups = same_data(entries(read))
    if len(groups) != 1:
        firsts = [group[0].run for group in groups]
        names = [f"{dataset(run)[0]}, {run.metric.words} ({run.folder})" for run in firsts]
        several = " and ".join(dict.fromkeys(names))
        raise CoterieError(
            f"these runs cannot be compared, their clients have different samples or metrics: {several or 'no runs'}"
        )
    (group,) = groups
    rows = [outcome(entry) for entry in group]
    owners: dict[tuple[Any, ...], Path] = {}
    for entry, row in zip(group, rows, strict=True):
        run = entry.run
        folder = owners.setdefault((settings_text(run), start(run), run.seed, row["content"]), run.folder)
        if folder != run.folder:
            raise CoterieError(
                f"{run.title} with seed {run.seed} is there twice, in {folder} and {run.folder}; leave one of them "
                "out, or train other seeds (`coterie compare --seed 5` begins with seed 5)"
            )
    curves: dict[str, list[Curve]] = {}
    for entry in group:
        curve = [(int(number), shown / entry.run.metric.factor) for number, shown in entry.run.curve(entry.point)]
        curves.setdefault(entry.label, []).append(curve)
    first, clients = group[0].run, max(len(row["clients"]) for row in rows)
    others = list(scales_of(first, list(dict.fromkeys(name for row in rows for name in row["metrics"]))).values())
    return Comparison(rows, dataset(first)[0], clients, reference(group), curves, first.metric, others)
