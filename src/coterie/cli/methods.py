"""Commands about the methods: list, filter and suggest them, cite their papers."""

from __future__ import annotations

import argparse
import io
import json
import sys
from typing import TYPE_CHECKING

from coterie.cli.flags import METHOD_HELP, MakeCommand, given

if TYPE_CHECKING:
    from coterie.analysis.catalogue import MethodEntry

SHOWN = 6  # suggestions


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    methods = command("methods", do_methods, "list the methods by family, filter them, or suggest some for a situation")
    methods.add_argument("--family", metavar="FAMILY", help="such as 'personal head'; the list shows all families")
    methods.add_argument("--year", metavar="YEARS", help="year of the paper, such as 2022, 2021-2023 or 2021-")
    methods.add_argument("--task", metavar="TASK", help="methods that work for a task, such as regression")
    methods.add_argument("--private", metavar="KIND", help="methods that allow dp-sample, dp-client or encrypt")
    methods.add_argument("--sends", metavar="WHAT", help="what travels: 'whole model', encoder, head, prototypes, ...")
    methods.add_argument("--suits", metavar="SITUATION", nargs="+", help="methods that suit all of these situations")
    methods.add_argument(
        "--needs", metavar="NEED", nargs="+", help="methods that need all of these: classes, norm, sgd, head, encoder"
    )
    methods.add_argument(
        "--traffic", metavar="SHARE", type=float, help="methods that send at most this share of FedAvg's bytes"
    )
    methods.add_argument("--sort", choices=["family", "traffic"], help="order of the list; default: family")
    methods.add_argument(
        "--suggest",
        metavar="SITUATION",
        nargs="*",
        help="a short list with reasons for situations such as 'few clients', 'label shift', 'feature shift', "
        "'new clients' or 'little bandwidth'; with filters: among those methods",
    )
    methods.add_argument("--markdown", action="store_true", help="print docs/methods.md")
    methods.add_argument("--json", action="store_true", help="print JSON")
    cite = command("cite", do_cite, "print complete BibTeX entries of methods' papers: full names, full venues")
    cite.add_argument("methods", metavar="METHOD", nargs="+", help=f"{METHOD_HELP}; also krum, bulyan, ... of --robust")


def do_methods(chosen: argparse.Namespace) -> None:
    from coterie.analysis.catalogue import entries
    from coterie.analysis.choosing import Filters, by_traffic, grouped

    if hasattr(chosen, "markdown"):
        from coterie.analysis.methods_page import markdown

        print(markdown(), end="")
        return
    found = Filters(**given(chosen, Filters)).chosen(entries())
    if getattr(chosen, "sort", "family") == "traffic":
        found = by_traffic(found)
    if hasattr(chosen, "suggest"):
        show_suggestions(chosen, found)
    elif hasattr(chosen, "json"):
        print(json.dumps([e.as_json() for e in found], indent=2))
    elif not found:
        print("No method matches all of these filters.")
    elif getattr(chosen, "sort", "family") == "traffic":
        show_traffic(found)
    else:
        from coterie.analysis.terminal import show_groups
        from coterie.core.families import FAMILIES

        rows = {
            f"{family}: {FAMILIES[family]}": [
                {"name": e.name, "about": e.description.about, "year": str(e.year or "")} for e in group
            ]
            for family, group in grouped(found).items()
        }
        show_groups(rows, f"{len(found)} methods. `coterie cite NAME` prints the BibTeX entry of a paper.")


def show_traffic(found: list[MethodEntry]) -> None:
    from coterie.analysis.terminal import show_table

    rows = [
        [e.name, f"{e.share:.1%}", f"{e.behavior.bytes_down:,}", f"{e.behavior.bytes_up:,}", e.description.about]
        for e in found
    ]
    note = "Bytes of one client in one round on a small network, and their share of what FedAvg sends there."
    show_table(f"{len(found)} methods by traffic", ("name", "share", "down", "up", "about"), rows, note)


def show_suggestions(chosen: argparse.Namespace, found: list[MethodEntry]) -> None:
    from coterie.analysis.choosing import situations, suggestions
    from coterie.analysis.terminal import show_table

    best = suggestions(found, chosen.suggest)
    if hasattr(chosen, "json"):
        print(json.dumps([{"name": s.entry.name, "met": s.met, "reason": s.reason} for s in best], indent=2))
        return
    if not best:
        print("No method matches.")
        return
    asked = situations(chosen.suggest)
    notes = ["Guidance from the papers' designs and the code, not a measurement: compare them on your data."]
    if len(best) > SHOWN:
        notes.insert(0, f"Also: {', '.join(s.entry.name for s in best[SHOWN:])}.")
    if len(best[0].met) < len(asked):
        notes.insert(0, f"No method meets all {len(asked)} situations; each of these meets {len(best[0].met)}.")
    rows = [[s.entry.name, s.reason] for s in best[:SHOWN]]
    show_table(f"For {', '.join(asked)}", ("name", "about"), rows, " ".join(notes))


def do_cite(chosen: argparse.Namespace) -> None:
    from coterie.analysis.citations import bibtex, cited, described
    from coterie.analysis.lookup import method_class, method_name, parts
    from coterie.core.errors import CoterieError
    from coterie.core.names import spelling
    from coterie.privacy.robust import PAPERS

    found: dict[str, None] = {}  # in order, each paper once
    robust = {spelling(how): (hows[0], text) for hows, text in PAPERS.items() for how in hows}
    for asked in chosen.methods:
        if spelling(asked) in robust:
            name, text = robust[spelling(asked)]
            found[bibtex(name, cited(text))] = None
            continue
        name = method_name(asked)
        kind = method_class(name)
        citation = described(kind).citation
        if citation is None:
            raise CoterieError(f"{kind.title} has no paper: the docstring of its file does not cite one")
        found[bibtex(kind.__name__ if ":" in name else parts(name)[0], citation)] = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # also where the locale lacks a letter of a name
    print("\n\n".join(found))
