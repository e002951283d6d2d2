"""Commands for the tables and figures of the papers: recipes, reproduce."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from coterie.cli.flags import MakeCommand, add_flags, add_format, add_max_time, asked_for, given, number_or_word


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    recipes = command("recipes", do_recipes, "list the tables and figures of the papers that can be reproduced")
    recipes.add_argument("filter", metavar="WORD", nargs="*", help="only recipes that contain all these words")
    recipes.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    recipes.add_argument("--json", action="store_true", help="print JSON")
    reproduce = command("reproduce", do_reproduce, "run recipes, and show their numbers next to the published ones")
    add_reproduce_flags(reproduce)
    if asked_for(argv, "reproduce"):
        from coterie.api import Execution

        add_flags(reproduce, "execution", Execution)


def add_reproduce_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipes", metavar="RECIPE", nargs="+", help="a name that `coterie recipes` lists, or a YAML file"
    )
    parser.add_argument("--methods", metavar="METHOD", nargs="+", help="only these methods")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with seeds 0, 1, ...; default: 3")
    parser.add_argument(
        "--partition-seed",
        type=number_or_word,
        metavar="SEED",
        help="another draw of the partition, or vary: one for every seed; stored apart from the recipe's own",
    )
    parser.add_argument(
        "--rounds", type=int, help="number of rounds, if not the paper's; such results are stored separately"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process; default: 1")
    add_max_time(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", default="runs/recipes", help="folder of results; default: runs/recipes"
    )
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    parser.add_argument("--show", action="store_true", help="run nothing, only show and draw existing results")
    parser.add_argument("--commit", help="commit of this code, if git is not available")
    add_format(parser)


def do_recipes(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.papers.recipes import listing, matches, recipes, terminal_row

    words = getattr(chosen, "filter", [])
    listed = [listing(r, getattr(chosen, "data_dir", None)) for r in recipes() if matches(r, words)]
    if not listed:
        raise CoterieError(f"no recipe contains '{' '.join(words)}'; `coterie recipes` lists all")
    if hasattr(chosen, "json"):
        print(json.dumps(listed, indent=2, default=str))
        return
    from coterie.analysis.terminal import show_groups

    groups: dict[str, list[dict[str, str]]] = {}
    for recipe in listed:
        groups.setdefault(recipe["paper"], []).append(terminal_row(recipe))
    show_groups(
        groups, "Steps: SGD steps of all clients and methods. Data: whether the dataset was found. --json has more."
    )


def do_reproduce(chosen: argparse.Namespace) -> None:
    from coterie.analysis import tables
    from coterie.analysis.terminal import console, print_line, silent
    from coterie.api import Execution
    from coterie.api.progress import errors, watcher
    from coterie.core.errors import CoterieError
    from coterie.federation.ending import seconds
    from coterie.papers.figures import write_figures
    from coterie.papers.recipes import Recipe, find
    from coterie.papers.reproduce import chosen_rows, reproduce, results
    from coterie.papers.results import Shelf
    from coterie.papers.tables import report

    recipes, shelf = list[Recipe](), Shelf(Path(chosen.out))
    drawn = getattr(chosen, "partition_seed", None)
    for recipe in (find(name).with_partition_seed(drawn) for name in chosen.recipes):
        if recipe not in recipes:
            recipes.append(recipe)
    asked = [(recipe, chosen_rows(recipe, getattr(chosen, "methods", None))) for recipe in recipes]
    rounds, format = getattr(chosen, "rounds", None), getattr(chosen, "format", "terminal")

    say = print_line if format == "terminal" else silent
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
            watching=lambda title, rounds: watcher(title, rounds, console if format == "terminal" else errors),
            jobs=chosen.jobs,
            max_seconds=seconds(chosen.max_time) if hasattr(chosen, "max_time") else None,
            say=say,
        )
    )
    made, figures = list[tables.TextTable](), list[str]()
    for recipe, rows in asked:
        found = results(recipe, recipe.rows, shelf, chosen.seeds, rounds)
        if not wrong or any(found.values()):  # an empty table would hide the error
            made += report(recipe, rows, found)
        try:
            if paths := write_figures(recipe, found, shelf.folder, rounds):
                figures.append(f"{recipe.place} is drawn in {', '.join(map(str, paths))}")
        except CoterieError as error:
            wrong.append(str(error))
    tables.show(made, format)
    for line in figures:
        say(line)
    if wrong:
        raise CoterieError("; ".join(wrong))
