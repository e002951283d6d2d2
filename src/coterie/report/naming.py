"""Names of runs in a report, from the method and the settings that differ, and the numbers that a run reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.execution.scoring import SERVER
from coterie.federation.history import POINTS
from coterie.methods import METHODS
from coterie.runs.stored_run import StoredRun

WORDS = {"pre": "PRE", "post": "POST", "finished": "finished", "kept": "kept", "global": "global"}  # points, in short
WORDS |= {"new_pre": "PRE, new clients", "new_post": "POST, new clients", "new_global": "global, new clients"}
OF_SEED = frozenset({"federation.seed", "model.start"})  # settings that differ between seeds
OF_PARTITION = frozenset(  # and those that differ where each seed has its own partition
    {"data.content", "data.new_content", "data.partition.hash", "data.partition.seed"}
    | {"data.train_sizes", "data.test_sizes"}
)


class Reported(NamedTuple):
    """One number that a run reports."""

    run: StoredRun
    label: str  # the same for runs that differ only in their seed
    name: str  # unique
    point: str


def entries(runs: Sequence[StoredRun]) -> list[Reported]:
    """All numbers that the runs report, in the order of the runs."""
    found = [
        (run, f"{outcome}{detail}", point)
        for run, detail in zip(runs, details(runs), strict=True)
        for outcome, point in outcomes(run).items()
    ]
    labels = Counter(label for _, label, _ in found)
    return [
        Reported(run, label, label if labels[label] == 1 else f"{label}, seed {run.seed}", point)
        for run, label, point in found
    ]


def results(run: StoredRun) -> list[Mapping[str, Any]]:
    """The outcomes in result.json."""
    listed = (run.result or {}).get("outcomes")
    return [o for o in listed if isinstance(o, dict)] if isinstance(listed, list) else []


def outcomes(run: StoredRun) -> dict[str, str]:
    """Name -> point of the numbers that the method reports; before these are measured, the first measured point."""
    points = {text: point for point, text in POINTS.items()}
    found = {str(o.get("name")): points.get(str(o.get("measured")), "") for o in results(run)}
    known = METHODS.get(str(run.section("method").get("class")))
    reported = found or (known.results if known else {run.title: "pre"})
    measured = {name: point for name, point in reported.items() if run.curve(point)}
    return measured or {f"{run.title} ({point})": point for point in run.measured[:1]}


def dataset(run: StoredRun) -> tuple[str, str]:
    """Name and partition of the data. Runs in which both agree have the same clients."""
    data = run.section("data")
    partition = data.get("partition")
    mark = partition.get("hash") if isinstance(partition, dict) else None
    return str(data.get("name", "unknown data")), str(mark or data.get("train_sizes", ""))


def comparable(run: StoredRun) -> tuple[str, str]:
    """Equal for runs that can be compared: by one metric, on the same data or on partitions by one rule."""
    name, mark = dataset(run)
    name = f"{name} {run.metric}"
    if not varies(run):
        return name, mark
    partition = run.section("data")["partition"]
    return name, json.dumps({k: v for k, v in partition.items() if k not in ("hash", "seed")}, sort_keys=True)


def client_label(run: StoredRun, number: int, point: str) -> str:
    """The client's name; its number if it has none or joined at the end."""
    if number == SERVER:
        return "server"
    known = number in run.client_ids and len(run.client_names) == len(run.client_ids) and not point.startswith("new_")
    return run.client_name(number) if known else str(number)


def details(runs: Sequence[StoredRun]) -> list[str]:
    """For each run, how it differs from others of its method; empty if only the seed differs."""
    groups: dict[str, list[tuple[StoredRun, dict[str, Any]]]] = {}
    for run in runs:
        groups.setdefault(run.title, []).append((run, settings(run)))
    found = {id(run): detail(run, own, group) for group in groups.values() for run, own in group}
    return [found[id(run)] for run in runs]


def detail(run: StoredRun, own: Mapping[str, Any], group: Sequence[tuple[StoredRun, Mapping[str, Any]]]) -> str:
    data = own.get("data.name")
    same = [(other, others) for other, others in group if others.get("data.name") == data]
    if len(same) < len(group):
        return f" on {data}{detail(run, own, same)}"
    differ = [name for name in own if any(other.get(name) != own[name] for _, other in group)]
    begun = [(other.seed, start(other)) for other, others in group if others == own]
    if begun.count((run.seed, start(run))) > 1 or len(differ) > 2:
        return f" ({run.folder.name})"
    words = [f", {name.rsplit('.', 1)[-1].replace('_', ' ')} {own[name]}" for name in differ]
    if len(set(begun)) > len({seed for seed, _ in begun}):  # one seed, but different initial weights
        words.append(f", start {start(run)[:7]}")
    return "".join(words)


def settings(run: StoredRun) -> dict[str, Any]:
    """The settings that affect results, except the seed and what follows from it."""
    parts = {name: run.section(name) for name in ("data", "model", "method", "federation")}
    follow = OF_SEED | (OF_PARTITION if varies(run) else frozenset())
    return {name: value for name, value in flat(parts).items() if name not in follow}


def varies(run: StoredRun) -> bool:
    """Whether every seed has its own partition."""
    partition = run.section("data").get("partition")
    return isinstance(partition, dict) and partition.get("partition_seed") == "vary"


def start(run: StoredRun) -> str:
    """The checksum of the initial weights."""
    return str(run.section("model").get("start", "unknown"))


def flat(parts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted names -> values."""
    found: dict[str, Any] = {}
    for name, value in parts.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


class Named(NamedTuple):
    """A run with its name."""

    run: StoredRun
    name: str  # unique


def named(runs: Sequence[StoredRun]) -> list[Named]:
    """Runs with unique names, after the first number that each reports."""
    first = {id(e.run): e for e in reversed(entries(runs))}
    found = [(run, first.get(id(run))) for run in runs]
    names = [entry.name if entry else run.title for run, entry in found]
    if len(set(names)) < len(names):
        names = [f"{run.title} ({run.folder.name})" for run in runs]
    return [Named(*row) for row in zip(runs, names, strict=True)]
