"""The command that writes a report of runs: report."""

from __future__ import annotations

import argparse

from coterie.cli.flags import MakeCommand


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    report = command("report", do_report, "write a report of runs: one HTML file that works offline")
    report.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds runs")
    report.add_argument("--out", metavar="FILE", default="report.html", help="the file to write; default: report.html")


def do_report(chosen: argparse.Namespace) -> None:
    from coterie.report.page import write_report

    print(write_report(chosen.runs, chosen.out))
