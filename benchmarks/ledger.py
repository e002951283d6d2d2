"""The tables of docs/results.md and the README, from the files in benchmarks/results.

python -m benchmarks.ledger          write them
python -m benchmarks.ledger --check  fail if they are not what the files say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from coterie.recipes import find
from coterie.reproduce import report
from coterie.results import Shelf
from coterie.tables import markdown

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

# Accuracy in percent as printed in FedPAC (ICLR 2023), Tables 1, 2, 4 and 5; 20 clients, all in every round. For runs
# from before there were recipes; the others' published numbers stand in these.
PUBLISHED = {
    "fashion-mnist-20": {
        "Local": 85.68, "FedAvg": 85.28, "FedAvg-FT": 90.47, "FedProx": 85.20, "SCAFFOLD": 86.29, "FedPer": 87.43,
        "LG-FedAvg": 85.66, "FedRep": 88.25, "FedBABU": 89.68, "Fed-RoD": 90.11, "kNN-Per": 90.02, "APFL": 89.45,
        "pFedMe": 89.76, "Ditto": 90.43, "FedFomo": 88.95, "pFedHN": 88.36, "HypCluster (k=5)": 89.08, "FedEM": 85.97,
        "FedEM-FT": 90.36, "FedProto-G": 87.47, "FedPAC (none)": 87.93, "FedPAC (alignment only)": 89.74,
        "FedPAC (combination only)": 89.92, "FedPAC": 91.83,
    },
}  # fmt: skip

# Cells whose method is named by its variant, and one that is read at another point than the run's own report.
TITLES = {
    "hypcluster-5": "HypCluster (k=5)",
    "fedproto-g": "FedProto-G",
    "fedpac-none": "FedPAC (none)",
    "fedpac-fa": "FedPAC (alignment only)",
    "fedpac-cc": "FedPAC (combination only)",
}
READ_AT = {"FedBABU": "post"}  # its clients fine-tune the encoder, which is what local training does


RECIPES = ("P1-T1-CIFAR10-20",)  # those with results here
SEEDS = 10  # of which as many are shown as there are


class Row(NamedTuple):
    method: str
    published: float | None
    ours: float
    point: str
    pre: float
    post: float
    shared: float | None
    seconds: float
    commit: str


def rows(name: str) -> list[Row]:
    table = load(name)
    return [
        Row(
            title,
            PUBLISHED[name].get(title),
            100 * value,
            point,
            *marks(cell),
            cell["seconds"]["total"],
            cell["commit"],
        )
        for cell in table["cells"]
        for title, value, point in outcomes(cell)
    ]


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def outcomes(cell: dict[str, Any]) -> list[tuple[str, float, str]]:
    found = []
    for title, outcome in cell["outcomes"].items():
        point = READ_AT.get(title, outcome["point"])
        found.append((TITLES.get(cell["method"], title), cell["last"][point], point))
    return found


def marks(cell: dict[str, Any]) -> tuple[float, float, float | None]:
    last = cell["last"]
    return 100 * last["pre"], 100 * last["post"], 100 * last["global"] if "global" in last else None


def full_table(name: str) -> str:
    about = load(name)
    lines = [
        f"FedPAC's protocol: {about['clients']} clients, all in every round, {about['rounds']} rounds, seed 0; "
        f"partition `{about['partition'][:12]}`. Measured {about['date']} on one {about['machine']}, clients batched, "
        f"torch {about['torch']}, Python {about['python']}.",
        "",
        "| method | published | ours | difference | read at | before | after | global | seconds | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows(name):
        published = "-" if r.published is None else f"{r.published:.2f}"
        difference = "-" if r.published is None else f"{r.ours - r.published:+.2f}"
        shared = "-" if r.shared is None else f"{r.shared:.2f}"
        lines.append(
            f"| {r.method} | {published} | {r.ours:.2f} | {difference} | {r.point} | {r.pre:.2f} | {r.post:.2f} "
            f"| {shared} | {r.seconds:.0f} | {r.commit} |"
        )
    return "\n".join(lines)


def recipe_table(name: str) -> str:
    """Published beside ours, and where ours come from."""
    recipe, shelf = find(name), Shelf(RESULTS)
    rows = [row for row in recipe.rows if shelf.find(recipe.plan(row, recipe.values[0]), 0)]
    table = report(recipe, rows, shelf, SEEDS, None)[0]
    made = [shelf.find(recipe.plan(row, recipe.values[0]), 0) or {} for row in rows]
    left = [row.name for row in recipe.rows if row not in rows]
    about = (
        f"Recipe `{name}`. Measured {told(made, 'date')} on one {told([m['hardware'] for m in made], 'machine')}, "
        f"clients batched, precision {told(made, 'precision')}, commit {told(made, 'commit')}, torch "
        f"{told([m['libraries'] for m in made], 'torch')}; partition `{told(made, 'partition')[:12]}`."
        + (f" Not run: {', '.join(left)}." if left else "")
    )
    lines = markdown(table._replace(note="")).strip().splitlines()[2:]  # without its title
    return "\n".join([about, "", *lines])


def told(made: list[dict[str, Any]], name: str) -> str:
    return ", ".join(sorted({str(content[name]) for content in made}))


def short_table() -> str:
    """For the README: two datasets side by side."""
    before = {r.method: (r.published, r.ours) for r in rows("fashion-mnist-20")}
    recipe, shelf = find(RECIPES[0]), Shelf(RESULTS)
    table = report(recipe, list(recipe.rows), shelf, SEEDS, None)[0]
    beside = {line[0]: (line[1], line[2]) for line in table.rows}
    lines = [
        "| method | Fashion-MNIST: published | ours | CIFAR-10: published | ours |",
        "|---|---|---|---|---|",
    ]
    for method in ("Local", "FedAvg", "FedAvg-FT", "FedPer", "FedRep", "Ditto", "FedPAC"):
        printed, ours = before[method]
        there = " | ".join(beside["Local-only" if method == "Local" else method])
        lines.append(f"| {method} | {printed:.2f} | {ours:.2f} | {there} |")
    return "\n".join(lines)


def renewed(page: str, tables: dict[str, str]) -> str:
    """The page with what stands between its marks replaced."""
    for name, table in tables.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.S)
        page, count = mark.subn(lambda found, table=table: f"{found[1]}{table}{found[2]}", page)  # type: ignore[misc]
        if count != 1:
            sys.exit(f"the mark <!-- {name} --> is there {count} times")
    return page


def pages() -> dict[Path, str]:
    wanted = {
        ROOT / "docs" / "results.md": {name: full_table(name) for name in PUBLISHED}
        | {name: recipe_table(name) for name in RECIPES},
        ROOT / "README.md": {"results": short_table()},
    }
    return {path: renewed(path.read_text(encoding="utf-8"), tables) for path, tables in wanted.items()}


def main() -> None:
    for path, page in pages().items():
        if "--check" in sys.argv:
            if path.read_text(encoding="utf-8") != page:
                sys.exit(f"{path.name} is not what benchmarks/results say; run python -m benchmarks.ledger")
        else:
            path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
