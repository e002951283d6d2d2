"""Commands about the papers' tables and figures, and about reports: recipes, reproduce, ledger, report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from coterie.cli.flags import MakeCommand, add_flags, add_format, asked_for, given


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    report = command("report", do_report, "write a report of runs: one HTML file that works offline")
    report.add_argument("runs", metavar="RUN", nargs="+", help="folder that a run left, or one that holds such")
    report.add_argument("--out", metavar="FILE", default="report.html", help="the file to write (report.html)")
    recipes = command("recipes", do_recipes, "list the tables and figures of the papers that can be run again")
    recipes.add_argument("filter", metavar="WORD", nargs="*", help="only those that have all these words in them")
    recipes.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    recipes.add_argument("--json", action="store_true", help="print JSON")
    reproduce = command("reproduce", do_reproduce, "run recipes, and put their numbers beside the published ones")
    add_reproduce_flags(reproduce)
    ledger = command("ledger", do_ledger, "write the tables of docs/results.md and the READMEs from files of results")
    ledger.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is not what they say"
    )
    ledger.add_argument("--results", metavar="FOLDER", default="benchmarks/results", help="(benchmarks/results)")
    if asked_for(argv, "reproduce"):
        from coterie.api import Execution

        add_flags(reproduce, "execution", Execution)


def add_reproduce_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipes", metavar="RECIPE", nargs="+", help="a name that `coterie recipes` lists, or a YAML file"
    )
    parser.add_argument("--methods", metavar="METHOD", nargs="+", help="only these of their methods")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with seeds 0, 1, ... (usually 3)")
    parser.add_argument("--rounds", type=int, help="other rounds than the paper's; kept apart from full runs")
    parser.add_argument(
        "--jobs", type=int, default=1, help="trainings at a time, each in a process of its own (usually 1)"
    )
    parser.add_argument("--out", metavar="FOLDER", default="runs/recipes", help="folder of results (runs/recipes)")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    parser.add_argument("--show", action="store_true", help="run nothing, only show and draw what is there")
    parser.add_argument("--commit", help="commit of this code, where git does not say it")
    add_format(parser)


def do_recipes(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.recipes import listing, matches, recipes, shortened

    words = getattr(chosen, "filter", [])
    listed = [listing(r, getattr(chosen, "data_dir", None)) for r in recipes() if matches(r, words)]
    if not listed:
        raise CoterieError(f"no recipe has '{' '.join(words)}' in it; `coterie recipes` lists all")
    if hasattr(chosen, "json"):
        print(json.dumps(listed, indent=2, default=str))
        return
    from coterie.display import show_groups

    groups: dict[str, list[dict[str, str]]] = {}
    for recipe in listed:
        groups.setdefault(recipe["paper"], []).append(shortened(recipe))
    show_groups(
        groups, "Steps: of SGD, of all clients and methods. Data: whether the dataset was found. --json tells more."
    )


def do_reproduce(chosen: argparse.Namespace) -> None:
    from coterie import tables
    from coterie.api import Execution
    from coterie.core.errors import CoterieError
    from coterie.display import console, watcher
    from coterie.figures import write_figure
    from coterie.recipes import Recipe, find
    from coterie.reproduce import chosen_rows, report, reproduce, results
    from coterie.results import Shelf

    recipes, shelf = list[Recipe](), Shelf(Path(chosen.out))
    for recipe in map(find, chosen.recipes):
        if recipe not in recipes:
            recipes.append(recipe)
    asked = [(recipe, chosen_rows(recipe, getattr(chosen, "methods", None))) for recipe in recipes]
    rounds, format = getattr(chosen, "rounds", None), getattr(chosen, "format", "terminal")

    def say(line: str) -> None:
        if format == "terminal":
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    wrong = (
        []
        if hasattr(chosen, "show")
        else reproduce(
            asked,
            shelf,
            seeds=chosen.seeds,
            rounds=rounds,
            how=Execution(**given(chosen, Execution)),
            data_dir=getattr(chosen, "data_dir", None),
            commit=getattr(chosen, "commit", None),
            watching=lambda title, rounds: watcher(title, rounds, format != "terminal"),
            jobs=chosen.jobs,
            say=say,
        )
    )
    made, figures = list[tables.Table](), list[str]()
    for recipe, rows in asked:
        found = results(recipe, recipe.rows, shelf, chosen.seeds, rounds)
        if not wrong or any(found.values()):  # a table of nothing would hide what is wrong
            made += report(recipe, rows, found, rounds)
        try:
            if path := write_figure(recipe, found, shelf.folder, rounds):
                figures.append(f"{recipe.place} is drawn in {path}")
        except CoterieError as error:
            wrong.append(str(error))
    tables.show(made, format)
    for line in figures:
        say(line)
    if wrong:
        raise CoterieError("; ".join(wrong))


def do_ledger(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.ledger import Files, differences, pages

    files, changed = Files(Path(chosen.results)), False
    if left := files.in_no_table():
        reason = "other settings than their recipe's, or one more of the same training"
        print(f"coterie: {len(left)} results are in no table ({reason}), such as {left[0]}", file=sys.stderr)
    for path, (old, new) in pages(files, Path()).items():
        if old == new:
            continue
        changed = True
        if hasattr(chosen, "check"):
            print(f"{path} is not what {chosen.results} says: {'; '.join(differences(old, new))}")
            continue
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new, encoding="utf-8")
        except OSError as error:
            raise CoterieError(f"cannot write {path}: {error.strerror}") from None
        print(path)
    if changed and hasattr(chosen, "check"):
        sys.exit(1)


def do_report(chosen: argparse.Namespace) -> None:
    from coterie.reports.page import write_report

    print(write_report(chosen.runs, chosen.out))
