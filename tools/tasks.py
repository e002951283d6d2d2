"""Writes the tables of results by task in docs/tasks.md from benchmarks/results/tasks.json, or checks them.

python -m tools.tasks --commit HASH RUNS ...   take the comparisons in these folders into the file, by their names
python -m tools.tasks                          write the page
python -m tools.tasks --check                  fail if the page differs from the file

The folders are what the commands on the page leave in runs/.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import coterie
from coterie.analysis.paired import p_value
from coterie.analysis.significance import Spread, holm, t_test
from tools.ledger import renewed

FILE = Path("benchmarks/results/tasks.json")
PAGE = Path("docs/tasks.md")
MARK = "results"
LOCAL, SHARED = "Local", "FedAvg"

Entry = dict[str, Any]


def taken(folder: Path, commit: str) -> Entry:
    """The scores of a comparison, as means over clients, by method and seed; and where they come from."""
    comparison = coterie.load_comparison(folder)
    config = min(folder.rglob("config.json"))
    ran = json.loads(config.read_text(encoding="utf-8"))["ran"]
    scale = 100 if comparison.metric.share else 1
    return {
        "clients": comparison.num_clients,
        "metric": comparison.metric.words,
        "higher": comparison.metric.higher,
        "share": comparison.metric.share,
        "scores": {
            name: {str(row["seed"]): scale * row["mean"] for row in rows} for name, rows in comparison.groups().items()
        },
        "origin": {"commit": commit, **{key: ran[key] for key in ("torch", "machine")}, "date": ran["started"][:10]},
    }


def tables(found: dict[str, Entry]) -> str:
    return "\n\n".join([scores(found), differences(found), provenance(found)])


def scores(found: dict[str, Entry]) -> str:
    """One row per method, one column per comparison."""
    methods = list(dict.fromkeys(name for entry in found.values() for name in entry["scores"]))
    heads = [f"{name}: {e['metric']}{'' if e['higher'] else ', lower is better'}" for name, e in found.items()]
    rows = [["", *heads], ["clients", *(str(entry["clients"]) for entry in found.values())]]
    rows += [[method, *(cell(entry["scores"].get(method)) for entry in found.values())] for method in methods]
    return markdown(rows, 1)


def cell(by_seed: dict[str, float] | None) -> str:
    return "" if by_seed is None else interval(list(by_seed.values()))


def interval(values: list[float]) -> str:
    spread = Spread.of(values)
    return f"{spread.mean:.2f}" if spread.half is None else f"{spread.mean:.2f} ± {spread.half:.2f}"


def differences(found: dict[str, Entry]) -> str:
    """Every method against Local and FedAvg, in pairs of seeds; p is corrected over all rows of a comparison."""
    rows = [["", "method", "against", "difference", "p", "at 5 %"]]
    for name, entry in found.items():
        by_method = entry["scores"]
        pairs = [
            (method, against, paired(by_method[method], by_method[against]))
            for against in (LOCAL, SHARED)
            for method in by_method
            if method != against and (method, against) != (LOCAL, SHARED)
        ]
        corrected = holm([t_test(gaps).p for *_, gaps in pairs])
        for (method, against, gaps), p in zip(pairs, corrected, strict=True):
            rows.append([name, method, against, interval(gaps), p_value(p), word(gaps, p, entry["higher"])])
    return markdown(rows, 3, 5)


def paired(own: dict[str, float], other: dict[str, float]) -> list[float]:
    return [own[seed] - other[seed] for seed in own if seed in other]


def word(gaps: list[float], p: float, higher: bool) -> str:
    if p >= 0.05:
        return "no difference shown"
    return "better" if (sum(gaps) > 0) == higher else "worse"


def provenance(found: dict[str, Entry]) -> str:
    """Comparisons that were run in the same way are named together."""
    ways: dict[str, list[str]] = {}
    for name, entry in found.items():
        at = entry["origin"]
        way = f"{at['machine']}, commit {at['commit']}, torch {at['torch']}, {at['date']}"
        ways.setdefault(way, []).append(name)
    return "; ".join(f"{', '.join(names)}: {way}" for way, names in ways.items()) + "."


def markdown(rows: list[list[str]], first: int, last: int | None = None) -> str:
    """first, last: columns of numbers, which are aligned to the right; last is not one of them."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    right = range(len(rows[0]))[first:last]
    marks = "".join("--:|" if column in right else "---|" for column in range(len(rows[0])))
    return "\n".join([lines[0], f"|{marks}", *lines[1:]])


def page(root: Path) -> str:
    old = (root / PAGE).read_text(encoding="utf-8")
    found = json.loads((root / FILE).read_text(encoding="utf-8"))
    return renewed(old, {MARK: f"\n\n{tables(found)}\n\n"}, str(PAGE))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tasks", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="folders of comparisons")
    parser.add_argument("--commit", help="commit that the comparisons were run with; needed to take them")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(argv)
    if given.runs:
        if not given.commit:
            parser.error("--commit names the commit that these comparisons were run with")
        found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        found |= {folder.name: taken(folder, given.commit) for folder in given.runs}
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    made = page(Path())
    if not given.check:
        PAGE.write_text(made, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != made:
        sys.exit(f"{PAGE} does not match {FILE}; run python -m tools.tasks")


if __name__ == "__main__":
    main(sys.argv[1:])
