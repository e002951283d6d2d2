"""The main numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.analysis.comparison import Comparison, cell
from coterie.analysis.outcomes import NEW
from coterie.analysis.significance import Spread
from coterie.federation.history import POINTS, worst_tenth_text
from coterie.report import row_charts
from coterie.report.charts import ChartRow
from coterie.report.elements import folded, grid, paragraph, section, table
from coterie.report.final_metrics import model_of, numbers_of
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import Reported, client_label, comparable, dataset, entries, outcomes, results
from coterie.report.sections.clients import tip
from coterie.report.seeds import SeedGroup, grouped, with_interval
from coterie.report.shortfalls import shortfalls
from coterie.runs.stored_run import StoredRun


def summary(runs: Sequence[StoredRun]) -> Markup:
    """The main numbers: tiles for one run, tables for several."""
    notes = [paragraph(note, class_="note") for run in runs for note in remarks(run, len(runs) > 1)]
    found = entries(runs)
    if len(runs) == 1:
        return section("summary", "Summary", *notes, tiles(found), grid([all_clients(grouped(runs))]))
    scores, tests = zip(*(comparison_tables(group) for group in same_data(found)), strict=True) if found else ((), ())
    return section("summary", "Summary", *notes, grid([all_clients(grouped(runs)), *filter(None, tests)]), *scores)


def remarks(run: StoredRun, several: bool) -> list[str]:
    """Remarks on unfinished and incomplete runs."""
    name = f"{run.title} ({run.folder.name})" if several else "This run"
    found = []
    if run.result is None:
        after = f"after round {max(run.rounds)}" if run.rounds else "before its first round ended"
        of = f" of {run.planned}" if run.rounds and run.planned else ""
        found.append(
            f"{name} is not finished: it stopped {after}{of}, or is still running. The report shows what it measured."
        )
    missing = [*run.missing, *shortfalls(run)]
    if missing:
        found.append(f"{name} has an incomplete folder: {'; '.join(missing)}.")
    return found


def last(entry: Reported) -> dict[str, float]:
    """The last measurement at an entry's point: mean, standard deviation, ..."""
    row = [row for row in entry.run.rounds.values() if f"{entry.point}_mean" in row][-1]
    return {key.removeprefix(f"{entry.point}_"): v for key, v in row.items() if key.startswith(f"{entry.point}_")}


def tiles(found: Sequence[Reported]) -> Markup:
    """The main numbers of one run as tiles."""
    made = []
    for entry in found:
        numbers, metric = last(entry), entry.run.metric
        unit, points = " %" * metric.share, "points, " * metric.share
        forms = {
            "mean": (f"{{}}{unit}", f"{entry.label}: mean {metric.words} over clients"),
            "worst10": (f"{{}}{unit}", f"mean of the worst 10 % of clients{worst_words(entry)}"),
            "std": ("{}", f"{points}standard deviation over clients"),
        }
        shown = {key: metric.number(value, 1) for key, value in numbers.items() if key in forms}
        made += [(form.format(shown[key]), words) for key, (form, words) in forms.items() if key in shown]
    if found:
        run = found[0].run
        made += [(size(run.total("bytes_")), "sent, up and down"), (duration(run.total("seconds_")), "of computing")]
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for value, name in made), class_="tiles")


def worst_words(entry: Reported) -> str:
    scores = entry.run.last_scores.get(entry.point)
    return f" ({worst_tenth_text([len(scores)])})" if scores else ""


def size(count: float) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def same_data(found: Sequence[Reported]) -> list[list[Reported]]:
    """Group entries that can be compared: on the same samples, or on partitions by one rule."""
    groups: dict[tuple[str, str], list[Reported]] = {}
    for entry in found:
        groups.setdefault(comparable(entry.run), []).append(entry)
    return list(groups.values())


def comparison_tables(group: Sequence[Reported]) -> tuple[Markup, Markup]:
    """Tables that compare methods on the same data: their scores, and paired tests, empty if there is no pair."""
    found = [outcome(entry) for entry in group]
    clients = max(len(o["clients"]) for o in found)
    name, metric = dataset(group[0].run)[0], group[0].run.metric
    scores, *tests = Comparison(found, name, clients, reference(group), metric=metric).text_tables()
    spent = [cell([o for o in found if o["method"] == row[0]], "seconds") for row in scores.rows]
    rows = [[*row, seconds] for row, seconds in zip(scores.rows, spent, strict=True)]
    made = [table(scores.title, [*scores.header, "seconds"], rows), paragraph(scores.note, class_="small")]
    if len(found) > len(rows):
        made.append(folded("Every seed", seed_table(group, found)))
    pairs = [
        tag("figure", tag("h3", "Paired tests"), table(t.title, t.header, t.rows), tag("figcaption", t.note))
        for t in tests
        if t.rows
    ]
    return join(*made), join(*pairs)


def reference(group: Sequence[Reported]) -> str | None:
    """The method that the user named to test the others of the comparison against, if all runs agree."""
    found = {e.label for e in group if e.run.reference and outcomes(e.run).get(e.run.reference) == e.point}
    return found.pop() if len(found) == 1 else None


def outcome(entry: Reported) -> dict[str, Any]:
    """An entry in the form of `coterie compare`."""
    run, scores = entry.run, entry.run.last_scores.get(entry.point, [])
    model = model_of(run, entry.point)
    chosen = [o.get("best_by_validation") for o in results(run) if o.get("measured") == POINTS[entry.point]]
    return {
        "method": entry.label,
        "seed": run.seed,
        **last(entry),
        **{p: curve[-1][1] / run.metric.factor for p in ("pre", "post", "global", *NEW) if (curve := run.curve(p))},
        "metrics": {} if model is None else {name: v.get("mean") for name, v in numbers_of(run)[model].items()},
        "best_by_validation": next((v for v in chosen if isinstance(v, float)), None),
        "megabytes": run.total("bytes_") / 1e6,
        "seconds": run.total("seconds_"),
        "content": str(run.section("data").get("content") or dataset(run)[1]),
        "clients": [s.client for s in scores],
        "scores": [s.value for s in scores],
    }


def seed_table(group: Sequence[Reported], found: Sequence[dict[str, Any]]) -> Markup:
    """The main numbers of every run."""
    metric, name = group[0].run.metric, dataset(group[0].run)[0]
    named = [o | {"method": entry.name} for entry, o in zip(group, found, strict=True)]
    scores = Comparison(named, name, max(len(o["clients"]) for o in found), metric=metric).text_tables()[0]
    rows = [[*row, f"{o['seconds']:.2f}"] for row, o in zip(scores.rows, found, strict=True)]
    return table(f"{scores.title}, every seed", ["run", *scores.header[1:], "seconds"], rows)


def all_clients(groups: Sequence[SeedGroup]) -> Markup:
    """One strip of clients per method; a client's score is its mean over seeds."""
    rows = [client_strip(group) for group in groups if group.client_scores()]
    if not rows:
        return join()
    metric = groups[0].run.metric
    unit = " percent" * metric.share
    ranges = [f"{r.name}: {metric.written(min(r.values), 1)} to {metric.written(max(r.values), 1)}{unit}" for r in rows]
    axis = f"{metric.words} on the client's test samples{', %' * metric.share}"
    drawn = row_charts.strips(f"{metric.title} of every client", "; ".join(ranges), rows, axis, metric)
    seeds = max(len(group.entries) for group in groups)
    several = f" Scores are means over {seeds} seeds." if all(group.same_clients for group in groups) else ""
    several = f"{several} ±: half of the 95 % interval over seeds." if seeds > 1 else ""
    caption = (
        "Each stroke is a client, darker where several coincide; the diamond is the mean. "
        f"The clients with the lowest {metric.words} are on the left.{several}"
    )
    return tag("figure", tag("h3", "Every client"), drawn, tag("figcaption", caption))


def client_strip(group: SeedGroup) -> ChartRow:
    metric, point = group.run.metric, group.point
    if len(group.entries) == 1:
        entry, scores = group.entries[0], group.run.last_scores[point]
        return ChartRow(group.label, [metric.factor * s.value for s in scores], [tip(entry, s) for s in scores],
                        group.look.color)  # fmt: skip
    found = group.client_scores()
    runs = {dataset(run): run for run in group.runs}
    tips = [
        f"{group.label}, client {client_label(runs[own], client, point)}: {with_interval(values, metric.written)}"
        f"{' %' * metric.share}{f' (mean over {len(values)} seeds)' * (len(values) > 1)}"
        for (own, client), values in found.items()
    ]
    half = Spread.of([metric.factor * last(entry)["mean"] for entry in group.entries]).half
    return ChartRow(group.label, [sum(v) / len(v) for v in found.values()], tips, group.look.color, half)
