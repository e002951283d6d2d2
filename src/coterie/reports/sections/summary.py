"""The main numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.comparison import NEW, cell, comparison
from coterie.federation.history import POINTS
from coterie.reports import charts
from coterie.reports.charts import Row
from coterie.reports.elements import figure, paragraph, section, table
from coterie.reports.markup import Markup, join, tag
from coterie.reports.naming import Entry, entries
from coterie.reports.reading import Run
from coterie.reports.sections.clients import tip
from coterie.reports.shortfalls import shortfalls


def summary(runs: Sequence[Run]) -> Markup:
    """The main numbers: a few large ones for one run, tables for several."""
    notes = [paragraph(note, class_="note") for run in runs for note in remarks(run, len(runs) > 1)]
    found = entries(runs)
    if len(runs) == 1:
        return section("summary", "Summary", *notes, tiles(found), all_clients(found))
    tables = [beside(group) for group in same_data(found)]
    return section("summary", "Summary", *notes, all_clients(found), *tables)


def remarks(run: Run, several: bool) -> list[str]:
    """What a reader must know before the numbers."""
    name = f"{run.method} ({run.folder.name})" if several else "This run"
    found = []
    if run.result is None:
        after = f"after round {max(run.rounds)}" if run.rounds else "before its first round ended"
        of = f" of {run.planned}" if run.rounds and run.planned else ""
        found.append(f"{name} did not end: it stopped {after}{of}, or goes on still. Here is what it had measured.")
    missing = [*run.missing, *shortfalls(run)]
    if missing:
        found.append(f"{name} is told as far as its folder goes: {'; '.join(missing)}.")
    return found


def last(entry: Entry) -> dict[str, float]:
    """Mean, spread and so on at an entry's point, when last measured."""
    row = [row for row in entry.run.rounds.values() if f"{entry.point}_mean" in row][-1]
    return {key.removeprefix(f"{entry.point}_"): v for key, v in row.items() if key.startswith(f"{entry.point}_")}


def tiles(found: Sequence[Entry]) -> Markup:
    """The main numbers of one run, large."""
    made = []
    for entry in found:
        numbers = last(entry)
        told = {
            "mean": ("{:.1f} %", f"{entry.label}: mean accuracy over clients"),
            "worst10": ("{:.1f} %", "mean of the worst 10 % of clients"),
            "std": ("± {:.1f}", "points, standard deviation over clients"),
        }
        made += [(form.format(100 * numbers[key]), words) for key, (form, words) in told.items() if key in numbers]
    if found:
        run = found[0].run
        made += [(size(run.total("bytes_")), "sent, up and down"), (duration(run.total("seconds_")), "of computing")]
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for value, name in made), class_="tiles")


def size(count: float) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def same_data(found: Sequence[Entry]) -> list[list[Entry]]:
    """Entries whose clients have the same samples: only those can be compared."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        groups.setdefault(entry.run.data, []).append(entry)
    return list(groups.values())


def beside(group: Sequence[Entry]) -> Markup:
    """Tables of methods beside each other, on the same data."""
    outcomes = [outcome(entry) for entry in group]
    clients = max(len(o["clients"]) for o in outcomes)
    seeds = max(len([o for o in outcomes if o["method"] == name]) for name in {o["method"] for o in outcomes})
    about = {"data": group[0].run.data[0], "clients": clients, "outcomes": outcomes}
    references = {e.label for e in group if e.run.reference and e.run.outcomes.get(e.run.reference) == e.point}
    accuracies, *tests = comparison(about, seeds, references.pop() if len(references) == 1 else None)
    spent = [cell([o for o in outcomes if o["method"] == row[0]], "seconds", 1) for row in accuracies.rows]
    rows = [[*row, seconds] for row, seconds in zip(accuracies.rows, spent, strict=True)]
    made = [table(accuracies.title, [*accuracies.header, "seconds"], rows), paragraph(accuracies.note, class_="small")]
    for test in tests:
        if test.rows:
            made += [table(test.title, test.header, test.rows), paragraph(test.note, class_="small")]
    return join(*made)


def outcome(entry: Entry) -> dict[str, Any]:
    """An entry as `coterie compare` keeps it."""
    run, scores = entry.run, entry.run.scores.get(entry.point, [])
    chosen = [o.get("best_by_validation") for o in run.told if o.get("measured") == POINTS[entry.point]]
    return {
        "method": entry.label,
        "seed": run.seed,
        **last(entry),
        **{p: curve[-1][1] / 100 for p in ("pre", "post", "global", *NEW) if (curve := run.curve(p))},
        "best_by_validation": next((v for v in chosen if isinstance(v, float)), None),
        "megabytes": run.total("bytes_") / 1e6,
        "seconds": run.total("seconds_"),
        "clients": [s.client for s in scores],
        "accuracies": [s.percent / 100 for s in scores],
    }


def all_clients(found: Sequence[Entry]) -> Markup:
    rows = [
        Row(e.name, [s.percent for s in scores], [tip(e.name, s) for s in scores])
        for e in found
        if (scores := e.run.scores.get(e.point))
    ]
    if not rows:
        return join()
    drawn = charts.strips(
        "Accuracy of every client",
        "; ".join(f"{r.name}: {min(r.values):.1f} to {max(r.values):.1f} percent" for r in rows),
        rows,
        "accuracy on the client's test samples, %",
    )
    caption = (
        "Every client is a stroke, darker where several are alike; the diamond is their mean. "
        "On the left are those whom a method serves least."
    )
    return figure(caption, drawn, class_="strips")
