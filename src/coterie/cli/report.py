"""Commands that present finished runs: report, table."""

from __future__ import annotations

import argparse

from coterie.cli.flags import MakeCommand, add_format


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    report = command("report", do_report, "write a report of runs: one HTML file that works offline")
    report.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds runs")
    report.add_argument("--out", metavar="FILE", default="report.html", help="the file to write; default: report.html")
    table = command("table", do_table, "make a table of finished runs for a paper: LaTeX, Markdown, CSV or HTML")
    table.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds runs")
    table.add_argument(
        "--columns",
        metavar="NAMES",
        help="the metric (such as accuracy), worst10, std_clients, by_samples, before, after, global, by_validation, "
        "new_before, new_after, new_global, megabytes, seconds; default: the metric and worst10",
    )
    table.add_argument("--against", metavar="METHOD", help="method that † marks differences from; default: the best")
    table.add_argument("--caption", metavar="TEXT", help="caption; default: dataset and number of clients")
    table.add_argument("--label", metavar="NAME", help="label for \\ref in LaTeX, such as tab:accuracy")
    add_format(table)


def do_report(chosen: argparse.Namespace) -> None:
    from coterie.report.page import write_report

    print(write_report(chosen.runs, chosen.out))


def do_table(chosen: argparse.Namespace) -> None:
    from coterie.analysis import tables
    from coterie.api.comparing import load_comparison

    found = load_comparison(*chosen.runs)
    columns = [name.strip() for name in getattr(chosen, "columns", "").split(",") if name.strip()]
    against, caption, label = (getattr(chosen, name, None) for name in ("against", "caption", "label"))
    tables.show([found.publication(columns, against, caption, label)], getattr(chosen, "format", "terminal"))
