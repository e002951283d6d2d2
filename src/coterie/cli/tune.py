"""The command that searches hyper-parameters: tune."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.flags import (
    METHOD_HELP,
    MakeCommand,
    add_format,
    add_trust,
    as_typed,
    asked_for,
    given,
    model_args,
    over,
)
from coterie.cli.recalling import recalled
from coterie.cli.train import add_method_flags, add_setting_flags

if TYPE_CHECKING:
    from coterie.tuning import Tuned

HOW = ("search", "trials", "search_seed", "eta", "seeds", "budget_rounds", "budget_minutes", "final")


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    tune = command("tune", do_tune, "search hyper-parameters on a validation split, never on the test samples")
    tune.add_argument("method", metavar="METHOD", nargs="?", help=METHOD_HELP)
    if asked_for(argv, "tune"):
        add_tune_flags(tune)
        add_setting_flags(tune, leave_out=("validation",), protections=False)  # trials are not protected
        add_method_flags(tune, argv[1:])


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    from coterie.tuning.search import VALIDATION
    from coterie.tuning.space import SEARCHES, TRIALS

    group = parser.add_argument_group("search")
    group.add_argument(
        "--over",
        nargs="+",
        metavar="NAME=VALUES",
        help="settings and values to try: lr=0.01,0.1 combine=true,false; for random search also ranges: lr=0.001..0.1",
    )
    group.add_argument(
        "--search",
        choices=SEARCHES,
        help="grid: all combinations; random; halving; tpe and asha: Optuna (coterie[tune]); default: grid",
    )
    group.add_argument("--trials", type=int, help=f"settings to draw, for all searches but grid; default: {TRIALS}")
    group.add_argument("--search-seed", type=int, metavar="SEED", help="seed of the proposals; default: 0")
    group.add_argument("--eta", type=int, help="halving, asha: the best 1/ETA train ETA times longer; default: 3")
    group.add_argument("--seeds", type=int, help="runs of each setting, with seeds SEED, SEED + 1, ...; default: 1")
    group.add_argument(
        "--validation",
        dest="held_out",
        type=float,
        metavar="SHARE",
        help=f"share of each client's training samples to choose by; default: {VALIDATION}",
    )
    group.add_argument("--budget-rounds", type=int, metavar="ROUNDS", help="limit on the rounds of all trials")
    group.add_argument("--budget-minutes", type=float, metavar="MINUTES", help="limit on the time of all trials")
    group.add_argument(
        "--no-final", dest="final", action="store_false", help="do not run the best setting on the test samples"
    )
    group.add_argument("--out", metavar="FOLDER", help="folder of the search; if it exists, the search continues")
    group.add_argument(
        "--resume", metavar="FOLDER", help="continue the search in this folder with its original command"
    )
    add_trust(parser)
    group.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    add_format(parser)


def do_tune(chosen: argparse.Namespace) -> None:
    from coterie.analysis import tables
    from coterie.analysis.terminal import console
    from coterie.api import DataSettings, Execution, load_clients, make_method
    from coterie.api.progress import errors, watcher
    from coterie.core.errors import CoterieError
    from coterie.tuning.search import VALIDATION, tune

    format, as_json = getattr(chosen, "format", "terminal"), hasattr(chosen, "json")
    if hasattr(chosen, "resume"):
        chosen = resumed(chosen)
    if not hasattr(chosen, "method") or not hasattr(chosen, "over"):
        raise CoterieError(
            "give a method and what to search, such as: coterie tune fedpac --over align=0.1,1,10 lr=0.01,0.1"
        )
    progress = None if as_json else console if format == "terminal" else errors
    command = {k: v for k, v in vars(chosen).items() if k not in ("act", "json", "format", "resume")}
    tuned = tune(
        chosen.method,
        over(chosen.over),
        load_clients(**given(chosen, DataSettings)),
        getattr(chosen, "model", None),
        validation=getattr(chosen, "held_out", VALIDATION),
        backend=Execution(**given(chosen, Execution)),
        out=getattr(chosen, "out", None),
        head=getattr(chosen, "head", None),
        model_args=model_args(chosen),
        train_only=getattr(chosen, "train_only", None),
        protocol=getattr(chosen, "protocol", "pac"),
        watching=lambda title, rounds: watcher(title, rounds, progress),
        config={"command": {"cwd": os.getcwd(), **command}},
        **{name: value for name in HOW if (value := getattr(chosen, name, None)) is not None},
        **settings_of(chosen, type(make_method(chosen.method))),
    )
    line = command_line(chosen, tuned)
    if as_json:
        print(json.dumps({**tuned.as_dict(), "command": line}, indent=2))
        return
    table, words = tuned.table(), tuned.last_words()
    if format != "terminal":
        tables.show([table._replace(note=" ".join([table.note, *words, f"The best setting: {line}"]))], format)
        return
    tables.show([table])
    for said in (*words, f"Everything is in {tuned.folder}", f"To run the best setting:\n{line}"):
        console.print(said, soft_wrap=True, highlight=False, markup=False)


def resumed(chosen: argparse.Namespace) -> argparse.Namespace:
    """The command that began the search in this folder."""
    from coterie.core.errors import CoterieError
    from coterie.tuning.search import read_search

    folder = Path(chosen.resume).resolve()
    command = read_search(folder).get("command")
    if not isinstance(command, dict) or "cwd" not in command:
        raise CoterieError(
            f"{chosen.resume} was not started by a command; in Python, call coterie.tune again with the same arguments"
        )
    again = recalled(command, chosen, folder)
    again.out = str(folder)
    return again


def settings_of(chosen: argparse.Namespace, method: type) -> dict[str, Any]:
    """The settings of coterie.run among the flags."""
    from coterie.core.training import LocalTraining
    from coterie.federation import Safety, Settings

    return {
        name: value for part in (LocalTraining, Settings, Safety, method) for name, value in given(chosen, part).items()
    }


def command_line(chosen: argparse.Namespace, tuned: Tuned) -> str:
    """The command `coterie run` with the best setting and all other flags."""
    from coterie.api import DataSettings, Execution, make_method, method_name
    from coterie.core.training import LocalTraining
    from coterie.federation import Safety, Settings

    name = method_name(chosen.method)
    settings = {**vars(chosen), **tuned.best}
    known = [name for name in ("model", "head", "train_only") if name in settings]
    named = [f"--{name.replace('_', '-')}={settings[name]}" for name in known]
    arguments = [f"{name}={value}" for name, value in model_args(chosen).items()]
    named += ["--model-args", *arguments] if arguments else []
    kinds = (DataSettings, LocalTraining, Settings, Safety, Execution, type(make_method(name)))
    return shlex.join(["coterie", "run", name, *named, *(flag for kind in kinds for flag in as_typed(kind, settings))])
