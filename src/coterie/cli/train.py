"""Commands that train: run, resume, compare, demo."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from coterie.cli.comparisons import (
    COMMAND,
    check_data,
    finished_rows,
    is_begun,
    note_command,
    read_command,
    write_outcomes,
)
from coterie.cli.flags import MakeCommand, add_flags, add_format, add_output, add_track, add_watch, asked_for, given


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    demo = command("demo", do_demo, "compare Local, FedAvg, FedAvg-FT and FedPAC on the shipped Fashion-MNIST")
    add_output(demo)
    run = command("run", do_run, "train with one method")
    run.add_argument("method", metavar="METHOD", help="`coterie methods` lists them")
    resume = command("resume", do_resume, "go on with a run or comparison that was stopped, as if it never had been")
    resume.add_argument("run", metavar="RUN", help="folder of the run, or of all runs of the comparison")
    resume.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    resume.add_argument("--data-dir", metavar="FOLDER", help="where the datasets are now")
    add_watch(resume)
    add_track(resume)
    compare = command("compare", do_compare, "train with several methods on the same data, and compare")
    compare.add_argument("methods", metavar="METHOD", nargs="+")
    compare.add_argument("--seeds", type=int, help="runs of each method, with seeds SEED, SEED + 1, ...")
    compare.add_argument("--against", metavar="METHOD", help="which of them the others are tested against; the last")
    add_format(compare)
    if asked_for(argv, "run", "compare"):
        add_run_flags(run if argv[0] == "run" else compare, argv[1:])
    if asked_for(argv, "resume"):
        from coterie.federation import Safety

        add_flags(resume, "safety", Safety)


def add_run_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    add_output(parser)
    add_watch(parser)
    add_track(parser)
    add_setting_flags(parser)
    if parser.prog.endswith("run"):
        add_method_flags(parser, argv)


def add_setting_flags(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Those of model, data, training, federation, safety and execution."""
    from coterie.api import DataSettings, Execution
    from coterie.core.local import Sgd
    from coterie.federation import Safety, Settings
    from coterie.protection import Protection
    from coterie.protection.encryption import Encryption
    from coterie.protocols import presets

    parser.add_argument(
        "--model", help="model: cnn, convnet, conv4, akd-cnn, resnet18, linear, mlp, or package.module:Class"
    )
    parser.add_argument("--head", metavar="NAME", help="name of the model's head, where it is not its last module")
    for title, kind in (
        ("data", DataSettings),
        ("local training", Sgd),
        ("federation", Settings),
        ("safety", Safety),
        ("protection", Protection),
        ("encryption", Encryption),
        ("execution", Execution),
    ):
        add_flags(parser, title, kind, leave_out, presets(DataSettings.dataset))


def add_method_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Those of the method that is named."""
    from coterie.api import make_method, method_name
    from coterie.core.errors import CoterieError
    from coterie.methods import parts
    from coterie.protocols import method_presets

    for word in argv:
        try:
            method = make_method(word)
        except CoterieError:
            continue  # a flag, or the value of one
        base, changes = parts(method_name(word))
        add_flags(parser, method.title, type(method), presets=[own | changes for own in method_presets(base)])
        return


def do_run(chosen: argparse.Namespace) -> None:
    train_all(chosen, [chosen.method], seeds=1)


def do_resume(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings, Execution, load_clients
    from coterie.comparison import title
    from coterie.core.errors import CoterieError
    from coterie.federation.folder import read_config

    run = Path(chosen.run).resolve()
    several = (run / COMMAND).exists()
    if (run / ("compare.json" if several else "result.json")).exists():
        print(f"{chosen.run} is finished; there is nothing to continue", file=sys.stderr)
        return
    if several:
        again = recalled(read_command(run), chosen)
        train_all(again, again.methods, seeds=getattr(again, "seeds", 1), begun=run)
        return
    config = read_config(run)
    if "deployment" in config:
        raise CoterieError(
            f"{chosen.run} is of a server: `coterie serve ... --out {chosen.run} --resume` goes on with it"
        )
    command = config.get("command")
    if not isinstance(command, dict) or not {"method", "seed", "cwd"} <= command.keys():
        raise CoterieError(
            f"{chosen.run} was not begun by a command; in Python, call coterie.run as it was called, with resume=True"
        )
    again = recalled(command, chosen)
    data, quiet = load_clients(**given(again, DataSettings)), hasattr(chosen, "json")
    how = Execution(**given(again, Execution))
    with live_page(again) as page:
        rows = train_one(again, again.method, again.seed, data, how, run, quiet, page, resume=True)
    table = {"data": data.name, "clients": data.clients, "folder": str(chosen.run), "outcomes": rows}
    if quiet:
        print(json.dumps(table, indent=2))
    else:
        show(table, 1, title(again.method), "terminal")


def recalled(command: dict[str, Any], chosen: argparse.Namespace) -> argparse.Namespace:
    """What was asked when it began, but for what is asked now; in the folder that its relative paths mean."""
    told = {name: tuples(value) for name, value in command.items() if name not in ("json", "watch", "format")}
    again = argparse.Namespace(**told | vars(chosen))
    if hasattr(chosen, "data_dir"):
        again.data_dir = os.path.abspath(chosen.data_dir)
    if os.path.isdir(again.cwd):
        os.chdir(again.cwd)
        sys.path.insert(0, again.cwd)
    return again


def tuples(value: Any) -> Any:
    """As flags are read: JSON knows lists only."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def do_compare(chosen: argparse.Namespace) -> None:
    train_all(chosen, chosen.methods, seeds=getattr(chosen, "seeds", 1))


def do_demo(chosen: argparse.Namespace) -> None:
    from coterie.demo import METHODS, SETTINGS

    vars(chosen).update({name: value for name, value in SETTINGS.items() if name not in vars(chosen)})
    do_compare(argparse.Namespace(**{"methods": METHODS, **vars(chosen)}))


def train_all(chosen: argparse.Namespace, names: list[str], seeds: int, begun: Path | None = None) -> None:
    """Every method with every seed, each training once; the outcomes, and a table for people.

    begun: the folder of a comparison that was stopped; what is there is not run again.
    """
    from coterie.api import DataSettings, Execution, load_clients, method_name
    from coterie.comparison import title
    from coterie.core.errors import CoterieError
    from coterie.federation.disk import lock
    from coterie.federation.stopping import Stopped
    from coterie.methods import training
    from coterie.trackers import make_trackers

    if seeds < 1:
        raise CoterieError(f"seeds must be at least 1, not {seeds}")
    names = [method_name(name) for name in names]  # a wrong one is told before anything is done
    against = method_name(getattr(chosen, "against", names[-1]))
    trainings = list(dict.fromkeys(map(training, names)))
    if training(against) not in trainings:
        raise CoterieError(
            f"{against} is not among the methods that are compared: --against is one of {', '.join(names)}"
        )
    make_trackers(getattr(chosen, "track", ()))  # the same of one whose package is missing
    format = getattr(chosen, "format", "terminal")
    quiet = hasattr(chosen, "json") or format != "terminal"
    data = load_clients(**given(chosen, DataSettings))
    first = getattr(chosen, "seed", 0)
    check_protection(chosen, names)
    base = begun or Path(getattr(chosen, "out", None) or default_folder(names, data.name))
    if begun is None and base.exists():
        raise CoterieError(f"{base} exists already; name another folder with --out, or remove it")
    many = len(trainings) * seeds > 1
    how = Execution(**given(chosen, Execution))
    if begun:
        check_data(base, data)
    elif many:
        note_command(base, chosen, data)
    try:
        with live_page(chosen) as page, lock(base / COMMAND) if many else contextlib.nullcontext():
            rows = [
                outcome
                for name in trainings
                for seed in range(first, first + seeds)
                for out in [base / f"{name}-seed{seed}" if many else base]
                for outcome in (
                    finished_rows(name, seed, out)
                    if (out / "result.json").exists()
                    else train_one(chosen, name, seed, data, how, out, quiet, page, resume=is_begun(out))
                )
            ]
    except Stopped as stop:
        more = f"; `coterie resume {base}` goes on with all of the comparison" if many else ""
        raise Stopped(f"{stop}{more}", stop.signal) from None
    folder = getattr(chosen, "run", str(base))
    table = {"data": data.name, "clients": data.clients, "folder": folder, "outcomes": rows}
    if many:
        write_outcomes(base, table)
    if hasattr(chosen, "json"):
        print(json.dumps(table, indent=2))
    else:
        show(table, seeds, title(against), format)


def check_protection(chosen: argparse.Namespace, names: list[str]) -> None:
    """A method that cannot have the protection is told before anything is trained."""
    from coterie.api import make_method
    from coterie.methods import parts
    from coterie.protection import Protection
    from coterie.protocols import method_preset

    wanted, protocol = Protection(**given(chosen, Protection)), getattr(chosen, "protocol", "pac")
    for name in names:
        base, changes = parts(name)
        own = given(chosen, type(make_method(name)))
        wanted.check(make_method(name, **method_preset(protocol, base) | changes | own))


def live_page(chosen: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """The page that --watch asks for, or None."""
    if not hasattr(chosen, "watch"):
        return contextlib.nullcontext()
    from coterie.reports.live import LivePage

    page = LivePage(chosen.watch)
    print(f"coterie: watch it at {page.address}", file=sys.stderr, flush=True)
    return page


def default_folder(names: list[str], data: str) -> Path:
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{'-'.join(names[:4])}-{data}"


def train_one(
    chosen: argparse.Namespace,
    name: str,
    seed: int,
    data: Any,
    how: Any,
    out: Path,
    quiet: bool,
    page: Any,
    resume: bool = False,
) -> list[dict[str, Any]]:
    from coterie.api import make_method, run
    from coterie.comparison import rows_of, title
    from coterie.core.local import Sgd
    from coterie.display import watcher
    from coterie.federation import Round, Safety, Settings
    from coterie.protection import Protection
    from coterie.protection.encryption import Encryption
    from coterie.protocols import preset

    kind = type(make_method(name))
    parts = (Sgd, Settings, Safety, Protection, Encryption, kind)
    settings = {name: value for part in parts for name, value in given(chosen, part).items()}
    settings["seed"] = seed
    command = {k: v for k, v in vars(chosen).items() if k != "act"}
    protocol = getattr(chosen, "protocol", "pac")
    rounds = settings.get("rounds") or preset(protocol, data.name).get("rounds", Settings.rounds)
    start = time.monotonic()
    if page:
        page.begin(title(name), rounds, seed)
    with watcher(title(name), rounds, quiet) as watch:

        def note(record: Round) -> None:
            watch(record)
            if page:
                page(record)

        result = run(
            name,
            getattr(chosen, "model", None),
            data,
            where=how,
            out=out,
            resume=resume,
            watch=note,
            track=getattr(chosen, "track", ()),
            head=getattr(chosen, "head", None),
            protocol=protocol,
            config={"command": {**command, "method": name, "seed": seed, "cwd": os.getcwd()}},
            **settings,
        )
    return rows_of(name, seed, result.history, result.outcomes(), time.monotonic() - start, result.privacy)


def in_words(method: str, privacy: Mapping[str, Any]) -> str:
    """Such as «FedAvg: ε = 2.31 at δ = 1e-05 for one client; it covers ...»."""
    found = f"ε = {privacy['epsilon']:.4g} at δ = {privacy['delta']:g}"
    return f"{method}: {found} for {privacy['neighbour']}; it covers {privacy['covers']}"


def show(table: dict[str, Any], seeds: int, against: str, format: str) -> None:
    from coterie import tables
    from coterie.comparison import comparison

    tables.show(comparison(table, seeds, against), format)
    if format == "terminal":
        from coterie.display import console

        for line in dict.fromkeys(in_words(o["method"], o["privacy"]) for o in table["outcomes"] if o["privacy"]):
            console.print(line, soft_wrap=True, highlight=False)
        console.print(f"Everything is in {table['folder']}", soft_wrap=True, highlight=False)
