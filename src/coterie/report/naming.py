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
MOST_SETTINGS, MOST_LETTERS = 2, 20  # in a name, and of a setting in it


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
    """For each run, how it differs from others of its method: the same for runs that differ only in their seed."""
    methods: dict[str, list[StoredRun]] = {}
    for run in runs:
        methods.setdefault(run.title, []).append(run)
    found: dict[int, str] = {}
    for own in methods.values():
        equal: dict[str, list[StoredRun]] = {}
        for run in own:
            equal.setdefault(settings_text(run), []).append(run)
        variants = list(equal.values())
        for words, variant in zip(distinguished(variants), variants, strict=True):
            trainings = repetitions(variant)
            for more, training in zip(told_apart(trainings), trainings, strict=True):
                found |= {id(run): words + more for run in training}
    return [found[id(run)] for run in runs]


def distinguished(variants: Sequence[Sequence[StoredRun]]) -> list[str]:
    """How each variant of a method, with settings of its own, differs from the others."""
    own = [settings(runs[0]) for runs in variants]
    several = len({chosen.get("data.name") for chosen in own}) > 1
    words = []
    for chosen in own:
        data = chosen.get("data.name")
        same = [other for other in own if other.get("data.name") == data]
        differ = [name for name in chosen if any(other.get(name) != chosen[name] for other in same)]
        differ = [name for name in differ if is_short(chosen[name])]
        listed = [f", {name.rsplit('.', 1)[-1].replace('_', ' ')} {chosen[name]}" for name in differ[:MOST_SETTINGS]]
        more = ", ..." * (len(differ) > MOST_SETTINGS)
        words.append(f"{f' on {data}' * several}{''.join(listed)}{more}")
    return with_folders(words, variants)


def repetitions(variant: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Runs with equal settings in groups in which every seed is there once; runs of one folder stay together."""
    starts = {(run.seed, start(run)) for run in variant}
    shared = {one for one, seeds in Counter(one for _, one in starts).items() if seeds > 1}  # not of a seed
    folders = Counter(run.folder.parent for run in variant)
    found: list[list[StoredRun]] = []

    def fits(run: StoredRun, group: Sequence[StoredRun]) -> bool:
        weights = {start(run), start(group[0])}
        return run.seed not in {other.seed for other in group} and (len(weights) == 1 or not weights & shared)

    for run in sorted(variant, key=lambda run: -folders[run.folder.parent]):
        fitting = [group for group in found if fits(run, group)]
        near = [group for group in fitting if run.folder.parent in {other.folder.parent for other in group}]
        if fitting:
            (near or fitting)[0].append(run)
        else:
            found.append([run])
    return found


def told_apart(groups: Sequence[Sequence[StoredRun]]) -> list[str]:
    """Names of repetitions: their initial weights where these differ, else their folders."""
    starts = [{start(run) for run in group} for group in groups]
    if len(set().union(*starts)) == len(groups) and all(len(own) == 1 for own in starts):
        return with_folders([f", start {next(iter(own))[:7]}" * (len(groups) > 1) for own in starts], groups)
    return with_folders([""] * len(groups), groups)


def with_folders(words: Sequence[str], groups: Sequence[Sequence[StoredRun]]) -> list[str]:
    """The words, with the folder of the runs where they are not unique."""
    folders = [(runs[0].folder if len(runs) == 1 else runs[0].folder.parent).name for runs in groups]
    full = [f"{w} ({f})" if words.count(w) > 1 else w for w, f in zip(words, folders, strict=True)]
    nth = [full[: i + 1].count(text) for i, text in enumerate(full)]
    return [f"{text[:-1]}, {n})" if full.count(text) > 1 else text for text, n in zip(full, nth, strict=True)]


def is_short(value: Any) -> bool:
    """Whether the value of a setting can be part of a name."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MOST_LETTERS)


def settings(run: StoredRun) -> dict[str, Any]:
    """The settings that affect results, except the seed and what follows from it."""
    parts = {name: run.section(name) for name in ("data", "model", "method", "federation")}
    follow = OF_SEED | (OF_PARTITION if varies(run) else frozenset())
    return {name: value for name, value in flat(parts).items() if name not in follow}


def settings_text(run: StoredRun) -> str:
    """The same for runs with equal settings."""
    return json.dumps(settings(run), sort_keys=True)


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
    first = {id(e.run): e.name for e in reversed(entries(runs))}
    labels = [f"{run.title}{detail}" for run, detail in zip(runs, details(runs), strict=True)]
    names = [
        first.get(id(run), label if labels.count(label) == 1 else f"{label}, seed {run.seed}")
        for run, label in zip(runs, labels, strict=True)
    ]
    return [Named(*row) for row in zip(runs, with_folders(names, [[run] for run in runs]), strict=True)]
