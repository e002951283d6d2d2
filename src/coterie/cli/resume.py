"""The command that continues a run or a comparison: resume."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.flags import MakeCommand, add_flags, add_track, add_trust, add_watch, asked_for, given
from coterie.cli.recalling import recalled
from coterie.cli.training import in_flags, live_page, show, train_all, train_one

if TYPE_CHECKING:
    from coterie.api.result import Result

LENGTH = ("rounds", "until", "patience", "max_time")  # settings that say how long a run is


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    resume = command(
        "resume", do_resume, "resume an interrupted run or comparison, bit for bit, or extend a finished one"
    )
    resume.add_argument("run", metavar="RUN", help="folder of the run, or of all runs of the comparison")
    resume.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    resume.add_argument("--data-dir", metavar="FOLDER", help="folder that the datasets are in now")
    resume.add_argument("--model", metavar="package.module:Class", help="the network, if it is not built in")
    resume.add_argument("--method", metavar="package.module:Class", help="the method, if it is not built in")
    resume.add_argument("--ray-address", metavar="HOST:PORT", help="the Ray cluster, if the run used one")
    resume.add_argument("--state-dir", metavar="FOLDER", help="folder for the clients' states, if the run used one")
    resume.add_argument("--rounds", type=int, help="total number of rounds; extends a finished or interrupted run")
    add_trust(resume)
    add_watch(resume)
    add_track(resume)
    if asked_for(argv, "resume"):
        from coterie.federation import Ending, Safety

        add_flags(resume, "safety", Safety)
        add_flags(resume, "ending", Ending)


def do_resume(chosen: argparse.Namespace) -> None:
    from coterie.api.comparison_folder import COMMAND
    from coterie.core.errors import CoterieError
    from coterie.runs.config import read_config
    from coterie.runs.disk import check_tree

    run = Path(chosen.run).resolve()
    if run.is_dir():
        check_tree(run)
    if (run / COMMAND).exists():
        resume_comparison(run, chosen)
        return
    if not any(hasattr(chosen, name) for name in LENGTH) and is_finished(run):
        print(f"{chosen.run} is finished{why_ended(run)}; --rounds N extends it to N rounds", file=sys.stderr)
        return
    config = read_config(run)
    if "deployment" in config:
        raise CoterieError(
            f"{chosen.run} is the run of a server: `coterie serve ... --out {chosen.run} --resume` continues it"
        )
    command = config.get("command")
    if not isinstance(command, dict) or not {"method", "seed", "cwd"} <= command.keys():
        raise CoterieError(
            f"{chosen.run} was not started by a command; in Python, call coterie.run again with exist='resume'"
        )
    again = recalled(command, chosen, run)
    if not to_do(run, again):
        print(f"{chosen.run} is finished{why_ended(run)}; it has that many rounds already", file=sys.stderr)
        return
    resume_run(run, again)


def resume_run(run: Path, again: argparse.Namespace) -> None:
    from coterie.api import DataSettings, load_clients
    from coterie.api.comparing import as_comparison, train_all
    from coterie.api.comparison_folder import as_table
    from coterie.api.entrants import Entrant

    data, entrant = load_clients(seed=again.seed, **given(again, DataSettings)), Entrant(again.method, again.method)
    with live_page(again) as page:

        def train(entrant: Entrant, seed: int, out: Path | None, resume: bool) -> Result:
            return train_one(again, entrant, seed, data, run, page, True, set())

        found = train_all([entrant], [again.seed], train, lambda *_: run, vars(again))
    show(again, as_table(found.rows, data, str(again.run), found.refused), as_comparison(found, data, entrant.title))


def resume_comparison(base: Path, chosen: argparse.Namespace) -> None:
    from coterie.api.comparison_folder import OUTCOMES, read_command, reopen_comparison
    from coterie.runs.finding import started_in

    again = recalled(read_command(base), chosen, base)
    if (base / OUTCOMES).exists():
        if not any(to_do(path, again) for path in started_in(base)):
            print(f"{chosen.run} is finished; --rounds N extends its runs to N rounds", file=sys.stderr)
            return
        reopen_comparison(base, {name: getattr(again, name, None) for name in LENGTH})
    train_all(again, again.methods, seeds=getattr(again, "seeds", 1), begun=base)


def to_do(run: Path, chosen: argparse.Namespace) -> bool:
    """Whether a run has rounds left under these flags."""
    from coterie.federation import Ending
    from coterie.runs.extending import remains

    return remains(run, getattr(chosen, "rounds", None), Ending(**given(chosen, Ending)))


def is_finished(run: Path) -> bool:
    """Whether the run ended for good; one that reached its time limit continues."""
    from coterie.runs.extending import ended_of

    ended = ended_of(run)
    return ended is not None and ended.reason != "max_time"


def why_ended(run: Path) -> str:
    from coterie.runs.extending import ended_of

    ended = ended_of(run)
    return f" (ended after round {ended.round} by {in_flags(ended)})" if ended and ended.explanation else ""
