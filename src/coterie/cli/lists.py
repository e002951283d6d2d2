"""Commands that list and show: data, privacy, pictures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.cli.downloads import add_download_actions
from coterie.cli.flags import MakeCommand, add_flags, asked_for, given
from coterie.cli.parser import ShortUsage

OPTIONS: dict[str, Any] = {"argument_default": argparse.SUPPRESS, "formatter_class": ShortUsage}
DRAWN = "fedreg"  # the method of `coterie pictures`, if none is named


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    data = command(
        "data", do_data, "list and get datasets, list partition rules, check your own data, export clients' data"
    )
    data.add_argument("--data-dir", metavar="FOLDER", help="folder with datasets (or set COTERIE_DATA)")
    data.add_argument("--json", action="store_true", help="print JSON")
    add_data_actions(data, argv)
    privacy = command("privacy", do_privacy, "list every field that leaves a device, and what protects it")
    privacy.add_argument("method", metavar="METHOD", nargs="?", help="`coterie methods` lists them; default: all")
    privacy.add_argument("--json", action="store_true", help="print JSON")
    privacy.add_argument("--markdown", action="store_true", help="print the table of docs/privacy.md")
    if asked_for(argv, "privacy"):
        from coterie.cli.train import add_method_flags
        from coterie.privacy import Protection
        from coterie.privacy.encryption import Encryption

        add_flags(privacy, "protection", Protection)
        add_flags(privacy, "encryption", Encryption)
        add_method_flags(privacy, argv[1:])
    pictures = command("pictures", do_pictures, "draw a partition, and how a method changes its classes and images")
    pictures.add_argument("--out", metavar="FOLDER", required=True, help="folder for the pictures")
    pictures.add_argument("method", metavar="METHOD", nargs="?", help=f"the method; default: {DRAWN}")
    if asked_for(argv, "pictures"):
        from coterie.api import DataSettings
        from coterie.api.protocols import presets
        from coterie.cli.train import add_method_flags

        add_flags(pictures, "data", DataSettings, presets=presets(DataSettings.dataset))
        add_method_flags(pictures, [*argv[1:], DRAWN])


def add_data_actions(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    about = "describe your own data, and report what is wrong with them"
    actions = parser.add_subparsers(metavar="[get NAME | path [NAME] | check PATH | export FOLDER]")
    add_download_actions(actions)
    check = actions.add_parser("check", help=about, description=about, **OPTIONS)
    check.set_defaults(act=do_check)
    check.add_argument("path", metavar="PATH", help="file or folder; docs/data.md lists the forms")
    check.add_argument("--json", action="store_true", help="print JSON")
    if argv[:2] == ["data", "check"]:
        from coterie.data.user import Reading

        add_flags(check, "reading", Reading)
    about = "write every client's samples as files (tables, images or arrays) that --dataset reads"
    export = actions.add_parser("export", help=about, description=about, **OPTIONS)
    export.set_defaults(act=do_export)
    export.add_argument("folder", metavar="FOLDER", help="a new folder")
    if argv[:2] == ["data", "export"]:
        from coterie.api import DataSettings

        add_flags(export, "data", DataSettings)


def summary(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


def do_privacy(chosen: argparse.Namespace) -> None:
    from coterie.api import make_method
    from coterie.deploy.fields import Mode, markdown, rows
    from coterie.privacy import Protection
    from coterie.privacy.encryption import Encryption

    if hasattr(chosen, "markdown"):
        print(markdown(), end="")
        return
    mode = Mode(Protection(**given(chosen, Protection)), bool(given(chosen, Encryption).get("encrypt")))
    method = make_method(chosen.method) if getattr(chosen, "method", None) else None
    if method is not None:
        method = dataclasses.replace(method, **given(chosen, type(method)))
    listed = rows(method, mode)
    if hasattr(chosen, "json"):
        print(json.dumps([row._asdict() for row in listed], indent=2))
        return
    width = max(len(row.field) for row in listed)
    print("\n".join(f"{row.field:{width}}  {row.protected}" for row in listed))


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
    from coterie.core.printable import printable
    from coterie.data.user import Reading, check, lines

    try:
        report = check(chosen.path, Reading(**given(chosen, Reading)))
        content, fine = report.as_json(), report.fine
        text = "\n".join(lines(report))
    except CoterieError as error:
        content, fine, text = {"path": chosen.path, "fine": False, "error": str(error)}, False, f"! {error}"
    print(json.dumps(content, indent=2) if hasattr(chosen, "json") else printable(text, keep="\n"))
    sys.exit(0 if fine else 1)


def do_export(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings, load_clients
    from coterie.data.user.export import export_clients

    data = load_clients(**given(chosen, DataSettings))
    written = export_clients(data, Path(chosen.folder))
    print(f"{data.num_clients} clients, {len(written)} files in {chosen.folder}, such as {written[0]}")


def do_pictures(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings, load_clients, make_method, portrait
    from coterie.report.data_pictures import augmented_samples, class_pictures

    method = make_method(getattr(chosen, "method", DRAWN))
    method = dataclasses.replace(method, **given(chosen, type(method)))
    data = load_clients(**given(chosen, DataSettings))
    counts, rule = data.train.class_counts(data.classes), data.partition and data.partition.name
    shares = portrait(data.name, rule, counts, data.class_names, data.client_names)
    drawn: dict[str, str | bytes] = {"partition.svg": shares, **class_pictures(data, method)}
    if data.train.x.ndim == 4 and (samples := augmented_samples(data, method)):
        drawn["augmented.png"] = samples
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in drawn.items():
        (out / name).write_bytes(content.encode() if isinstance(content, str) else content)
        print(out / name)


def show_list(chosen: argparse.Namespace, title: str, listed: list[dict[str, Any]], columns: Sequence[str]) -> None:
    if hasattr(chosen, "json"):
        print(json.dumps(listed, indent=2, default=str))
        return
    from coterie.analysis.terminal import show_table

    show_table(title, columns, [[str(entry.get(column, "")) for column in columns] for entry in listed])
