"""What runs are called beside each other: by method, and by what else differs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.reports.reading import Run

WORDS = {"pre": "PRE", "post": "POST", "finished": "finished", "kept": "kept", "global": "global"}  # points, in short
WORDS |= {"new_pre": "PRE, new clients", "new_post": "POST, new clients", "new_global": "global, new clients"}


class Entry(NamedTuple):
    """One number that a run reports."""

    run: Run
    label: str  # the same for runs that differ in their seed only
    name: str  # no two have the same
    point: str
    look: int  # in charts


def entries(runs: Sequence[Run]) -> list[Entry]:
    """All that the runs report, in their order."""
    found = [
        (run, f"{outcome}{detail}", point)
        for run, detail in zip(runs, details(runs), strict=True)
        for outcome, point in run.outcomes.items()
    ]
    labels = Counter(label for _, label, _ in found)
    return [
        Entry(run, label, label if labels[label] == 1 else f"{label}, seed {run.seed}", point, look)
        for look, (run, label, point) in enumerate(found)
    ]


def details(runs: Sequence[Run]) -> list[str]:
    """For every run what sets it apart from others of its method; nothing, if only the seed does."""
    groups: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append((run, settings(run)))
    told = {id(run): detail(run, own, alike) for alike in groups.values() for run, own in alike}
    return [told[id(run)] for run in runs]


def detail(run: Run, own: Mapping[str, Any], alike: Sequence[tuple[Run, Mapping[str, Any]]]) -> str:
    differ = [name for name in own if any(other.get(name) != own[name] for _, other in alike)]
    begun = [(other.seed, start(other)) for other, set_so in alike if set_so == own]
    if begun.count((run.seed, start(run))) > 1 or len(differ) > 2:
        return f" ({run.folder.name})"
    words = [f", {name.rsplit('.', 1)[-1].replace('_', ' ')} {own[name]}" for name in differ]
    if len(set(begun)) > len({seed for seed, _ in begun}):  # weights of the user's own, with the same seed
        words.append(f", start {start(run)[:7]}")
    return "".join(words)


def settings(run: Run) -> dict[str, Any]:
    """What decides on the numbers, but for the seed and the first weights, which follow from it."""
    parts = {name: run.section(name) for name in ("data", "model", "method", "federation")}
    return {name: value for name, value in flat(parts).items() if name not in ("federation.seed", "model.start")}


def start(run: Run) -> str:
    """The checksum of the weights that it began with."""
    return str(run.section("model").get("start", "unknown"))


def flat(parts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Names with dots -> values."""
    found: dict[str, Any] = {}
    for name, value in parts.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


class Named(NamedTuple):
    """A run, whatever it reports."""

    run: Run
    name: str  # no two have the same
    look: int


def named(runs: Sequence[Run]) -> list[Named]:
    """Runs called by the first that they report."""
    first = {id(e.run): e for e in reversed(entries(runs))}
    found = [(run, first.get(id(run))) for run in runs]
    names = [entry.name if entry else run.method for run, entry in found]
    if len(set(names)) < len(names):
        names = [f"{run.method} ({run.folder.name})" for run in runs]
    looks = [entry.look if entry else i for i, (_, entry) in enumerate(found)]
    return [Named(*row) for row in zip(runs, names, looks, strict=True)]
