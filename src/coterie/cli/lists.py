"""Commands that list what there is: methods, data, pictures of data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.cli.flags import MakeCommand, add_flags, asked_for, given


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    methods = command("methods", do_methods, "list the methods")
    methods.add_argument("--markdown", action="store_true", help="print docs/methods.md")
    data = command("data", do_data, "list the datasets and partition rules, or check data of your own")
    data.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    for listing in (methods, data):
        listing.add_argument("--json", action="store_true", help="print JSON")
    add_data_check(data, argv)
    pictures = command("pictures", do_pictures, "draw a partition, FedReG's rebalancing of it, and augmented samples")
    pictures.add_argument("--out", metavar="FOLDER", required=True, help="folder for the pictures")
    pictures.add_argument("--threshold", default="average", help="average, median, max or second-smallest")
    if asked_for(argv, "pictures"):
        from coterie.api import DataSettings
        from coterie.protocols import presets

        add_flags(pictures, "data", DataSettings, presets=presets(DataSettings.dataset))


def add_data_check(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    about = "tell what is in data of your own, and what is wrong with it"
    actions = parser.add_subparsers(metavar="[check PATH]")
    check = actions.add_parser("check", help=about, description=about, argument_default=argparse.SUPPRESS)
    check.set_defaults(act=do_check)
    check.add_argument("path", metavar="PATH", help="file or folder; docs/data.md lists the forms")
    check.add_argument("--json", action="store_true", help="print JSON")
    if argv[:2] == ["data", "check"]:
        from coterie.data.own import Reading

        add_flags(check, "reading", Reading)


def do_methods(chosen: argparse.Namespace) -> None:
    from coterie.catalogue import entries, markdown

    if hasattr(chosen, "markdown"):
        print(markdown(), end="")
        return
    listed = [e._asdict() for e in entries()]
    show_list(chosen, "Methods", listed, ("name", "about"))


def summary(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


def do_data(chosen: argparse.Namespace) -> None:
    from coterie.data import DATASETS, PARTITIONS

    datasets = [{"name": name, "about": source.description, "from": source.origin} for name, source in DATASETS.items()]
    rules = [{"name": name, "about": summary(rule.__doc__)} for name, rule in PARTITIONS.items()]
    if hasattr(chosen, "json"):
        print(json.dumps({"datasets": datasets, "partitions": rules}, indent=2))
        return
    show_list(chosen, "Datasets", datasets, ("name", "about", "from"))
    show_list(chosen, "Partition rules", rules, ("name", "about"))


def do_check(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.data.own import Reading, check, lines

    try:
        report = check(chosen.path, Reading(**given(chosen, Reading)))
        content, fine = report.as_json(), report.fine
        text = "\n".join(lines(report))
    except CoterieError as error:
        content, fine, text = {"path": chosen.path, "fine": False, "error": str(error)}, False, f"! {error}"
    print(json.dumps(content, indent=2) if hasattr(chosen, "json") else text)
    sys.exit(0 if fine else 1)


def do_pictures(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings, load_clients, portrait
    from coterie.reports.rebalancing import augmented_samples, class_pictures

    data = load_clients(**given(chosen, DataSettings))
    counts, rule = data.train.class_counts(data.classes), data.partition and data.partition.name
    shares = portrait(data.name, rule, counts, data.class_names)
    drawn: dict[str, str | bytes] = {"partition.svg": shares, **class_pictures(data, chosen.threshold)}
    if data.train.x.ndim == 4:
        drawn["augmented.png"] = augmented_samples(data)
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in drawn.items():
        (out / name).write_bytes(content.encode() if isinstance(content, str) else content)
        print(out / name)


def show_list(chosen: argparse.Namespace, title: str, listed: list[dict[str, Any]], columns: Sequence[str]) -> None:
    if hasattr(chosen, "json"):
        print(json.dumps(listed, indent=2, default=str))
        return
    from coterie.display import show_table

    show_table(title, columns, [[str(entry.get(column, "")) for column in columns] for entry in listed])
