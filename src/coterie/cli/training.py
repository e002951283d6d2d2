"""Runs of a command: every method with every seed, in folders, with progress and tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.configuring import save_config
from coterie.cli.flags import given, model_args, over, run_settings

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.analysis.comparison import Comparison
    from coterie.api.entrants import Entrant
    from coterie.api.result import Result
    from coterie.federation import Ended


def train_all(chosen: argparse.Namespace, methods: Sequence[str], seeds: int, begun: Path | None = None) -> None:
    """Train every method with every seed, and print the outcomes.

    begun: the folder of a comparison that was stopped; its finished runs are not run again.
    """
    from coterie.api import VARY, DataSettings, load_clients
    from coterie.api import comparing as core
    from coterie.api import entrants as named
    from coterie.api.comparison_folder import COMMAND, as_table, begin_again, check_data, note_command, write_outcomes
    from coterie.api.existing import Place, check_members, prepared
    from coterie.core.errors import CoterieError
    from coterie.runs.disk import lock
    from coterie.runs.finding import new_folder
    from coterie.runs.stopping import Stopped
    from coterie.runs.trackers import make_trackers

    first = getattr(chosen, "seed", 0)
    numbers = core.seeds_from(first, seeds)
    listed = named.entrants(methods, over(getattr(chosen, "over", ())))
    named.check_fixed(listed, vars(chosen))
    taken, against = named.trainings(listed), named.reference_of(listed, getattr(chosen, "against", None))
    track = getattr(chosen, "track", "")
    make_trackers(track or ())  # fail early where a package is missing
    data = load_clients(seed=first, **given(chosen, DataSettings))
    varies = getattr(chosen, "partition_seed", None) == VARY
    named.check_protection(taken, getattr(chosen, "protocol", "pac"), vars(chosen))
    names = named.ALL if listed[0].optional else "-".join(entrant.name for entrant in listed[:4])
    out = begun or Path(getattr(chosen, "out", None) or new_folder(f"{names}-{data.name}"))
    exist = getattr(chosen, "exist", "error")
    if begun is None and exist == "error" and out.exists():
        raise CoterieError(f"{out} exists already; name another folder with --out, or use --exist resume or replace")
    many = len(taken) * seeds > 1
    save_config(chosen, data)
    places = {entrant.name: place for place, entrant in enumerate(taken)}
    shown: set[str] = set()  # first lines of runs

    def data_of(seed: int) -> Any:
        """All runs have the same data, or those of one seed do."""
        return load_clients(seed=seed, **given(chosen, DataSettings)) if varies and seed != first else data

    opened = contextlib.nullcontext(Place(begun, True)) if begun else prepared(out, exist, track=track.split(","))
    with opened as place:
        base = place.folder
        assert base is not None

        def folder_of(entrant: Entrant, seed: int) -> Path:
            return base / f"{entrant.name}-seed{seed}" if many else base

        if many and place.resume:
            check_data(base, data)
            if not begun:
                check_members(base, [folder_of(entrant, seed) for entrant in taken for seed in numbers])
                begin_again(base, command_of(chosen))
        elif many:
            note_command(base, command_of(chosen), data)
        try:
            with live_page(chosen) as page, lock(base / COMMAND) if many else contextlib.nullcontext():

                def train(entrant: Entrant, seed: int, folder: Path | None, resume: bool) -> Result:
                    assert folder is not None
                    own = dict(entrant.settings)
                    if own:
                        own |= {
                            "place": places[entrant.name],
                            "reference": entrant.labels.get(against or ""),
                            "over": None,
                        }
                    how = argparse.Namespace(**vars(chosen) | own)
                    return train_one(how, entrant, seed, data_of(seed), folder, page, resume, shown)

                verify = place.resume and not begun
                found = core.train_all(taken, numbers, train, folder_of, vars(chosen), verify=verify)
        except Stopped as stop:
            more = f"; `coterie resume {base}` continues the whole comparison" if many else ""
            raise Stopped(f"{stop}{more}", stop.signal) from None
        table = as_table(found.rows, data, getattr(chosen, "run", str(out)), found.refused)
        if many:
            write_outcomes(base, table)
    show(chosen, table, core.as_comparison(found, data, against))


def train_one(
    chosen: argparse.Namespace,
    entrant: Entrant,
    seed: int,
    data: Any,
    out: Path,
    page: Any,
    resume: bool,
    shown: set[str],
) -> Result:
    """One run in its folder. shown: first lines of runs that were printed before, which are not repeated."""
    from coterie.api import Execution, execute
    from coterie.api.progress import first_lines, watcher

    planned = 0
    if page:
        page.follow(out)

    def watching(_: str, rounds: int) -> Any:
        nonlocal planned
        planned = rounds
        return watcher(entrant.title, rounds, progress_on(chosen))

    result = execute(
        entrant.method,
        data,
        getattr(chosen, "model", None),
        backend=Execution(**given(chosen, Execution)),
        out=out,
        resume=resume,
        watching=watching,
        show=first_lines(progress_on(chosen), shown),
        track=getattr(chosen, "track", ()),
        head=getattr(chosen, "head", None),
        model_args=model_args(chosen),
        train_only=getattr(chosen, "train_only", None),
        protocol=getattr(chosen, "protocol", "pac"),
        config={"command": {**command_of(chosen), "method": entrant.method, "seed": seed, "cwd": os.getcwd()}},
        **run_settings(chosen, str(entrant.method)) | {"seed": seed},
    )
    if result.ended and result.ended.explanation and not is_machine_readable(chosen):
        print(f"{entrant.title} ended after round {result.ended.round} of {planned} by {in_flags(result.ended)}")
    return result


def command_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """The command, as it is kept in run folders."""
    return {name: value for name, value in vars(chosen).items() if name != "act" and value is not None}


def is_machine_readable(chosen: argparse.Namespace) -> bool:
    """Whether stdout has the result only."""
    return hasattr(chosen, "json") or getattr(chosen, "format", "terminal") != "terminal"


def progress_on(chosen: argparse.Namespace) -> Console | None:
    """Where progress goes: stdout; stderr where stdout has tables in another format; none with --json."""
    from coterie.analysis.terminal import console
    from coterie.api.progress import errors

    if hasattr(chosen, "json"):
        return None
    return errors if is_machine_readable(chosen) else console


def live_page(chosen: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """The live page of --watch, or None."""
    if not hasattr(chosen, "watch"):
        return contextlib.nullcontext()
    from coterie.report.live import LivePage

    page = LivePage(chosen.watch)
    print(f"coterie: watch it at {page.address}", file=sys.stderr, flush=True)
    return page


def in_flags(ended: Ended) -> str:
    """Why a run ended, with the flag that ended it."""
    return f"--{ended.reason.replace('_', '-')}: {ended.explanation}"


def in_words(method: str, privacy: Mapping[str, Any]) -> str:
    """Such as: FedAvg: ε = 2.31 at δ = 1e-05 for one client; it covers ..."""
    accountant = privacy.get("accountant", "renyi")  # the only one when it was not recorded
    found = f"ε = {privacy['epsilon']:.4g} at δ = {privacy['delta']:g} for {privacy['neighbour']}"
    missing = ", ".join(privacy["not_covered"])
    return (
        f"{method}: {found}, accountant: {accountant}; it covers {privacy['covers']}, and does not cover: {missing}; "
        f"noise is {privacy['noise']}"
    )


def show(chosen: argparse.Namespace, table: Mapping[str, Any], comparison: Comparison) -> None:
    """Print the outcomes as JSON, or as tables in the requested format."""
    from coterie.analysis import tables
    from coterie.analysis.terminal import console

    if hasattr(chosen, "json"):
        print(json.dumps(table, indent=2))
        return
    format = getattr(chosen, "format", "terminal")
    tables.show(comparison.text_tables(), format)
    if format == "terminal":
        for line in dict.fromkeys(in_words(o["method"], o["privacy"]) for o in table["outcomes"] if o["privacy"]):
            console.print(line, soft_wrap=True, highlight=False)
        console.print(f"Everything is in {table['folder']}", soft_wrap=True, highlight=False)
