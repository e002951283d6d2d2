"""Generates the tables and plots of docs/performance.md and the READMEs' sentence on speed from benchmarks/results.

python -m benchmarks.performance          write them
python -m benchmarks.performance --check  fail if they differ from the files
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.ledger import renewed

from benchmarks import tables
from benchmarks.peers.page import page as peers
from benchmarks.plot import plot
from benchmarks.sweep import NAMES
from coterie.execution.backend import PRECISIONS
from coterie.papers.recipes import find
from coterie.papers.results import Shelf, seconds_alone

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SHOWN_FIRST = ("cifar-20", "fmnist-20")  # the README shows the first of these that was measured

Results = dict[str, dict[str, Any]]


def load() -> dict[str, Results]:
    """Machine, from the name of the file -> its measurements."""
    files = sorted(RESULTS.glob("speed-*.json"))
    return {f.stem.removeprefix("speed-"): json.loads(f.read_text(encoding="utf-8")) for f in files}


def origin(entries: list[dict[str, Any]]) -> str:
    def all_of(name: str) -> str:
        return ", ".join(sorted({str(entry[name]) for entry in entries}))

    return (
        f"{all_of('machine')}; commit {all_of('commit')}, torch {all_of('torch')}, Python {all_of('python')}, "
        f"{all_of('date')}"
    )


def load_average(entries: list[dict[str, Any]]) -> str:
    """Other work on the machine increases seconds, but hardly CPU time."""
    loads = [load for entry in entries for load in entry["load"] if load is not None]
    return f"Load average before and after: {min(loads):g} to {max(loads):g}." if loads else ""


def speed(found: dict[str, Results]) -> str:
    """All workloads, by machine."""
    parts = []
    for machine, results in found.items():
        if not (entries := list(results["workloads"].values())):
            continue
        parts += [f"### {machine}", f"{origin(entries)}. {load_average(entries)} Peaks: {tables.peaks(entries[-1])}."]
        for entry in entries:
            about = f"`{entry['workload']['name']}` (commit {entry['commit']}): {entry['about']}."
            parts += [about, tables.table(entry)]
    return "\n\n".join([*parts, tables.NOTES])


def whole(found: dict[str, Results], others: bool = False) -> str:
    """Whole runs, by machine. others: of the workloads that other simulators publish."""
    parts, names = [], published().keys()
    for results in found.values():
        entries = [e for e in results.get("runs", {}).values() if (e["workload"]["name"] in names) is others]
        if entries:
            parts += [f"{origin(entries)}. {load_average(entries)}", tables.runs(entries)]
    return "\n\n".join(parts) or "Not measured yet."


def published() -> dict[str, dict[str, str]]:
    """Workload -> how another simulator defines it, and the time and hardware that it states."""
    found: dict[str, dict[str, str]] = json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))
    return found


def references() -> str:
    """The published workloads and their times."""
    rows = [["workload", "simulator", "time that they state", "their hardware"]]
    rows += [[f"`{n}`", p["simulator"], p["stated"], p["hardware"]] for n, p in published().items()]
    about = [
        f"- `{name}`: {p['definition']}. Here: {p['differs']}. Source: {p['source']}."
        for name, p in published().items()
    ]
    return "\n\n".join([tables.markdown(rows), "\n".join(about)])


def growth(found: dict[str, Results]) -> str:
    parts = []
    for machine, results in found.items():
        for what, sweep in results["sweeps"].items():
            title = f"Seconds per round by {NAMES[what]}"
            parts += [
                f"### {machine}: {sweep['across']}",
                f"{sweep['about']}, except for the setting that varies. {origin([sweep])}. {load_average([sweep])}",
                f"![{title}]({picture_name(machine, what)})",
                tables.growth(sweep),
            ]
    return "\n\n".join(parts) or "Not measured yet."


def profiles(found: dict[str, Results]) -> str:
    """Profile of the first workload that was measured with `--profile`."""
    parts = []
    for machine, results in found.items():
        profiled = (n for n in SHOWN_FIRST if any("profile" in way for way in measured_ways(results, n).values()))
        name = next(profiled, "")
        for way, measured in measured_ways(results, name).items():
            if "profile" in measured:
                rows = [["operation", "share of time, %"]]
                rows += [[f"`{op}`", f"{100 * share:.1f}"] for op, share in measured["profile"].items()]
                commit = results["workloads"][name]["commit"]
                parts += [f"`{name}` on {machine}, {way} (commit {commit}):", tables.markdown(rows)]
    return "\n\n".join(parts)


def measured_ways(results: Results, workload: str) -> dict[str, Any]:
    """Measurements of a workload by execution; empty if it was not measured."""
    measured: dict[str, Any] = results["workloads"].get(workload, {}).get("ways", {})
    return measured


def tried() -> str:
    """Alternatives that were measured, from tried.json."""
    parts = []
    for table in json.loads((RESULTS / "tried.json").read_text(encoding="utf-8")):
        rows = [["variant", *table["measured"]], *([what, *values] for what, *values in table["rows"])]
        parts += [table["about"], tables.markdown(rows)]
    return "\n\n".join(parts)


def precision() -> str:
    """Results of recipes by precision, on a GPU and on a CPU."""
    on_gpu, on_cpu = by_precision("precision", PRECISIONS), by_precision("precision-cpu", ("fp32", "bf16"))
    return f"{on_gpu}\n\n{fused()}\n\n{on_cpu}"


def by_precision(folder: str, kinds: Sequence[str]) -> str:
    """One row per training, as the mean over seeds."""
    rows, origins = [["recipe, method", *kinds, "published"]], []
    paths = found(folder, kinds[0], "*/*")
    for training in sorted({re.sub(r"-seed\d+", "-seed*", f"{path.parent.name}/{path.stem}") for path in paths}):
        made = [[read(path) for path in found(folder, kind, training)] for kind in kinds]
        name = training.split("/")[0]
        own = RESULTS / f"{name}.yaml"
        row = next(r for r in find(str(own) if own.exists() else name).rows if r.training == made[0][0]["method"])
        ours = [fmean(100 * content["history"][row.point]["clients"][-1] for content in seeds) for seeds in made]
        printed = row.published.get((), {}).get("accuracy")
        rows.append([f"{name}, {row.name}", *(f"{a:.2f}" for a in ours), f"{printed.mean:.2f}" if printed else "-"])
        taken = [seconds_alone(content) for seeds in made for content in seeds]
        if None not in taken and len(taken) == len(kinds) and folder == "precision":
            rows.append(["· run time, with startup", *(f"{seconds:.1f} s" for seconds in taken), ""])
        origins += [content for seeds in made for content in seeds]
    origin = {name: ", ".join(sorted({str(c[name]) for c in origins})) for name in ("commit", "date", "seed")}
    machines = ", ".join(sorted({c["hardware"]["machine"] for c in origins}))
    return f"{machines}; commit {origin['commit']}, {origin['date']}, seed {origin['seed']}.\n\n{tables.markdown(rows)}"


def found(folder: str, kind: str, training: str) -> list[Path]:
    return sorted((RESULTS / folder / kind).glob(f"{training}.json"))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def fused() -> str:
    """The same trainings before and after fused convolutions, each alone on the GPU."""
    before = json.loads((RESULTS / "cifar10-20.json").read_text(encoding="utf-8"))
    recipe, shelf = find("P1-T1-CIFAR10-20"), Shelf(RESULTS)
    rows = [["CIFAR-10, 20 clients, seed 0", "cuDNN grouped", "fused", "seconds, cuDNN grouped", "seconds, fused"]]
    for row in recipe.rows:
        made = shelf.find(recipe.plan(row, ()), 0)
        cell = next((c for c in before["cells"] if c["method"] == row.method), None)
        if made and cell and seconds_alone(made) is not None:
            point = {"finished": "post"}.get(row.point, row.point) if row.method == "fedbabu" else row.point
            accuracies = [100 * cell["last"][point], 100 * made["history"][row.point]["clients"][-1]]
            seconds = [cell["seconds"]["total"], made["seconds"]["total"]]
            rows.append([row.name, *(f"{a:.2f}" for a in accuracies), *(f"{s:.0f}" for s in seconds)])
    return tables.markdown(rows)


def first(results: Results) -> str:
    return next((name for name in SHOWN_FIRST if name in results["workloads"]), "")


def sentence(found: dict[str, Results]) -> str:
    """For the README."""
    text = "; ".join(f"on {m}, {', '.join(f'{x:.1f}× ({way})' for way, x in ways.items())}" for m, ways in fast(found))
    text = f"Speedup of one FedPAC round with 20 clients over a plain PyTorch loop: {text}."
    return textwrap.fill(text, 118, initial_indent="  ", subsequent_indent="  ").strip()


def sentence_zh(found: dict[str, Results]) -> str:
    """For the README in Chinese."""
    terms = {"looped, 2 processes": "两个进程", "looped, 1 process": "一个进程", "x86_64, 2 cores": "x86_64（2 核）"}
    terms |= {"NVIDIA H200": "NVIDIA H200 "} | {f"stacked, {kind}": f"堆叠，{kind}" for kind in PRECISIONS}
    text = "；".join(
        f"在 {terms.get(m, m)}上为 {'、'.join(f'{x:.1f}×（{terms.get(way, way)}）' for way, x in ways.items())}"
        for m, ways in fast(found)
    )
    return f"20 个客户端的一轮 FedPAC，相对于普通 PyTorch 循环的加速比：{text}。"


def fast(found: dict[str, Results]) -> list[tuple[str, dict[str, float]]]:
    """Machine, and the speedup of each execution over a plain loop."""
    entries = [results["workloads"][name] for results in found.values() if (name := first(results))]
    return [(e["machine"], {title: way["times_as_fast"] for title, way in e["ways"].items()}) for e in entries]


def picture_name(machine: str, what: str) -> str:
    return f"growth-{what}-{machine}.svg"


def picture(sweep: dict[str, Any]) -> str:
    curves = {
        name: [(point["value"], point[key]) for point in sweep["points"]]
        for name, key in (("ours", "seconds"), ("plain loop", "plain_seconds"))
    }
    return plot(f"{sweep['machine']}: one FedPAC round", sweep["across"], "seconds", curves)


def pages() -> dict[Path, str]:
    found, docs = load(), ROOT / "docs"
    texts = {
        "speed": speed(found),
        "runs": whole(found),
        "peers": peers(),
        "published": f"{whole(found, others=True)}\n\n{references()}",
        "growth": growth(found),
        "profiles": profiles(found),
        "precision": precision(),
        "tried": tried(),
    }
    wanted = {
        docs / "performance.md": {name: f"\n\n{text}\n\n" for name, text in texts.items()},
        ROOT / "README.md": {"speed": sentence(found)},
        ROOT / "README.zh.md": {"speed": sentence_zh(found)},
    }
    pictures = {
        docs / picture_name(machine, what): picture(sweep)
        for machine, results in found.items()
        for what, sweep in results["sweeps"].items()
    }
    made = {path: renewed(path.read_text(encoding="utf-8"), marks, path.name) for path, marks in wanted.items()}
    return made | pictures


def main() -> None:
    for path, page in pages().items():
        if "--check" in sys.argv:
            if not path.exists() or path.read_text(encoding="utf-8") != page:
                sys.exit(f"{path.name} does not match benchmarks/results; run python -m benchmarks.performance")
        else:
            path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
