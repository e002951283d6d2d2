"""The command that compares tuned methods on many benchmarks: leaderboard."""

from __future__ import annotations

import argparse
from pathlib import Path

from coterie.cli.flags import MakeCommand, add_flags, add_format, add_max_time, asked_for, given


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    board = command(
        "leaderboard", do_leaderboard, "tune methods with an equal budget on many benchmarks, and rank them"
    )
    add_board_flags(board)
    if asked_for(argv, "leaderboard"):
        from coterie.api import Execution

        add_flags(board, "execution", Execution)


def add_board_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--benchmarks", metavar="NAME", nargs="+", help="benchmarks or sets of them; all: every one; default: quick"
    )
    parser.add_argument(
        "--methods", metavar="METHOD", nargs="+", help="methods; all: every one; default: those of the rules"
    )
    parser.add_argument("--seeds", metavar="SEED", nargs="+", type=int, help="only these seeds of the rules")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and run nothing")
    parser.add_argument("--show", action="store_true", help="run nothing, only show existing results")
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time, each in its own process; default: 1")
    add_max_time(parser)
    parser.add_argument(
        "--merge", metavar="PATH", nargs="+", help="first add the results of these folders, or archives made by --pack"
    )
    parser.add_argument("--pack", metavar="FILE", help="finally write all results into this archive, a .tar.gz")
    parser.add_argument(
        "--out", metavar="FOLDER", default="runs/leaderboard", help="folder of results; default: runs/leaderboard"
    )
    parser.add_argument("--html", metavar="FILE", help="the page; default: leaderboard.html in the folder of results")
    parser.add_argument("--rules", metavar="FILE", help="rules of your own, a YAML file")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    parser.add_argument("--commit", help="commit of this code, if git is not available")
    add_format(parser)


def do_leaderboard(chosen: argparse.Namespace) -> None:
    from coterie.analysis import tables
    from coterie.analysis.terminal import console, print_line, silent
    from coterie.api import Execution
    from coterie.api.progress import errors, watcher
    from coterie.core.errors import CoterieError
    from coterie.federation.ending import seconds
    from coterie.papers.leaderboard import BoardFolder, jobs_left, read_rules, run_board, summary
    from coterie.report.leaderboard import write_board

    rules = read_rules(Path(chosen.rules)) if hasattr(chosen, "rules") else read_rules()
    format = getattr(chosen, "format", "terminal")
    if hasattr(chosen, "list"):
        sets = {b.id: ", ".join(name for name, own in rules.sets.items() if b.id in own) for b in rules.benchmarks}
        rows = [[b.id, sets[b.id], b.text] for b in rules.benchmarks]
        tables.show([tables.TextTable("Benchmarks", ["name", "set", "what"], rows)], format)
        return
    benchmarks = rules.chosen(getattr(chosen, "benchmarks", None))
    methods = rules.chosen_methods(getattr(chosen, "methods", None))
    seeds = rules.chosen_seeds(getattr(chosen, "seeds", None))
    limit = seconds(chosen.max_time) if hasattr(chosen, "max_time") else None
    folder, wrong = BoardFolder(Path(chosen.out), rules), list[str]()

    say = print_line if format == "terminal" else silent
    if hasattr(chosen, "merge"):
        say(f"{folder.merge([Path(path) for path in chosen.merge])} new files were merged into {folder.folder}")
    if not hasattr(chosen, "show"):
        wrong = run_board(
            jobs_left(rules, benchmarks, methods, seeds, folder.load()),
            folder,
            how=Execution(**given(chosen, Execution)),
            data_dir=getattr(chosen, "data_dir", None),
            commit=getattr(chosen, "commit", None),
            watching=lambda title, rounds: watcher(title, rounds, console if format == "terminal" else errors),
            at_once=chosen.jobs,
            max_seconds=limit,
            say=say,
        )
    found = folder.load()
    if not found:
        raise CoterieError("; ".join(wrong) or f"{folder.folder} has no results; leave out --show to run some")
    board = summary(rules, found, benchmarks, methods)
    tables.show([board.table()], format)
    for method, benchmark, reason in board.reasons:
        say(f"{method} on {benchmark}: {reason}")
    say(f"The page is {write_board(board, Path(getattr(chosen, 'html', folder.folder / 'leaderboard.html')))}")
    if hasattr(chosen, "pack"):
        say(f"All results are in {folder.pack(Path(chosen.pack))}")
    if wrong:
        raise CoterieError("; ".join(wrong))
