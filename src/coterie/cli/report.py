"""Commands that present runs: watch, report, plot, table."""

from __future__ import annotations

import argparse

from coterie.cli.flags import MakeCommand, add_format, asked_for
from coterie.cli.parser import Listed


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    watch = command("watch", do_watch, "show runs in progress, of any process, on a local web page")
    watch.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds runs")
    watch.add_argument("--port", type=int, default=0, help="port of http://127.0.0.1:PORT; default: a free one")
    report = command("report", do_report, "write a report of runs: one HTML file that works offline")
    report.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds runs")
    report.add_argument("--out", metavar="FILE", default="report.html", help="the file to write; default: report.html")
    plot = command("plot", do_plot, "draw a figure of runs for a paper: PDF, SVG or PNG")
    plot.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds runs")
    if asked_for(argv, "plot"):
        from coterie.report.figures import FORMATS, KINDS, SIZES

        plot.add_argument("--kind", choices=KINDS, default="curves", help="what to draw; default: curves")
        plot.add_argument("--size", choices=SIZES, default="acm", help="column of a venue's template; default: acm")
        plot.add_argument("--format", choices=FORMATS, help="default: the ending of --out, or pdf")
        plot.add_argument("--out", metavar="FILE", help="the file to write; default: KIND.FORMAT")
    table = command("table", do_table, "make a table of finished runs for a paper: LaTeX, Markdown, CSV or HTML")
    table.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or one that holds runs")
    table.add_argument(
        "--columns",
        action=Listed,
        metavar="NAMES",
        help="the metric (such as accuracy), worst10, std_clients, by_samples, before, after, global, by_validation, "
        "new_before, new_after, new_global, megabytes, seconds, and every metric of evaluation.csv, such as auroc; "
        "default: the metric and worst10",
    )
    table.add_argument(
        "--against",
        metavar="METHOD",
        help="method to test against; † marks differences; default: that of the comparison, else the best",
    )
    table.add_argument("--caption", metavar="TEXT", help="caption; default: dataset and number of clients")
    table.add_argument("--label", metavar="NAME", help="label for \\ref in LaTeX, such as tab:accuracy")
    table.add_argument("--out", metavar="FILE", help="write it here; the ending .tex, .md, .csv or .html is its format")
    add_format(table)


def do_watch(chosen: argparse.Namespace) -> None:
    import contextlib
    import threading
    from pathlib import Path

    from coterie.core.errors import CoterieError
    from coterie.report.live import LivePage

    for path in map(Path, chosen.runs):
        if not path.is_dir():
            raise CoterieError(f"{path}: no such folder; give a folder that `coterie run --out` created")
    with contextlib.suppress(KeyboardInterrupt), LivePage(chosen.port, chosen.runs) as page:
        print(f"coterie: watch it at {page.address}; Ctrl-C ends it", flush=True)
        threading.Event().wait()


def do_report(chosen: argparse.Namespace) -> None:
    from coterie.report.page import write_report

    print(write_report(chosen.runs, chosen.out))


def do_plot(chosen: argparse.Namespace) -> None:
    from pathlib import Path

    from coterie.core.errors import CoterieError
    from coterie.report.figures import FORMATS, write_figure

    out = getattr(chosen, "out", None)
    ending = Path(out).suffix.removeprefix(".") if out else ""
    format = getattr(chosen, "format", ending or "pdf")
    if ending and ending != format:
        raise CoterieError(f"--out {out} does not end in .{format}, which --format names")
    if format not in FORMATS:
        raise CoterieError(f"{out}: figures are written as .pdf, .svg or .png")
    print(write_figure(chosen.runs, chosen.kind, chosen.size, out or f"{chosen.kind}.{format}", format))


def do_table(chosen: argparse.Namespace) -> None:
    from pathlib import Path

    from coterie.analysis import tables
    from coterie.api.comparing import load_comparison
    from coterie.core.names import separated
    from coterie.report.page import write_text

    found = load_comparison(*chosen.runs)
    columns = separated(getattr(chosen, "columns", ""))
    against, caption, label = (getattr(chosen, name, None) for name in ("against", "caption", "label"))
    made = found.publication(columns, against, caption, label)
    if hasattr(chosen, "out"):
        path = Path(chosen.out)
        format = tables.format_of(path, getattr(chosen, "format", None))
        print(write_text(tables.text(made, format), path))
    else:
        tables.show([made], getattr(chosen, "format", "terminal"))
