"""Tables of published numbers next to ours, with verdicts and paired tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.paired import paired_tests
from coterie.analysis.significance import Spread
from coterie.analysis.tables import TextTable
from coterie.api import VARY
from coterie.papers.recipes import Published, Recipe, RecipeRow, Value
from coterie.papers.results import Found, accuracies, outcome

NEAR = 1.5  # points
MET = "met"  # verdict of a difference of at most NEAR


def report(recipe: Recipe, rows: Sequence[RecipeRow], found: Found, rounds: int | None) -> list[TextTable]:
    """Published numbers next to ours, then paired tests."""
    tables = [comparison(recipe, rows, found, rounds)]
    for value in recipe.values:
        for measure in recipe.measures:
            tables += tests(recipe, rows, found, value, measure)
    return tables


def counting(averages: dict[str, str]) -> str:
    """Describe what has equal weight in the mean."""
    if len(set(averages.values())) == 1:
        return f"mean over {next(iter(averages.values()))}"
    return ", ".join(f"{measure}: mean over {average}" for measure, average in averages.items())


def comparison(recipe: Recipe, rows: Sequence[RecipeRow], found: Found, rounds: int | None) -> TextTable:
    several = len(recipe.measures) > 1
    lines = []
    for row in rows:
        for value in recipe.values:
            reduced = rounds is not None and rounds != recipe.plan(row, value).federation.rounds
            for measure, average in recipe.averages.items():
                point = recipe.point(row, measure)
                scores = [outcome(c, point, recipe.report, average) for c in found[row.name, value].values()]
                printed = row.published.get(value, {}).get(measure)
                numbers = line(printed, [s for s in scores if s is not None], reduced)
                settings = [str(setting) for _, setting in value]
                lines.append([row.name, *settings, *([measure] if several else []), *numbers, point])
    taken = {"last": "of the last round", "best": "of the best round", "mean of last 10": "mean of the last ten rounds"}
    note = [
        f"Accuracy in percent, {taken[recipe.report]}; {counting(recipe.averages)}. 95 %: half of the "
        f"confidence interval over seeds (Student's t). Verdict: met if within {NEAR} points of the published number; "
        "reduced if the rounds are not the paper's, so not comparable.",
        *(["Every seed has its own partition."] if recipe.partition.get("seed") == VARY else []),
        *recipe.notes,
    ]
    header = [
        "method",
        *recipe.vary,
        *(["measure"] if several else []),
        "published",
        "ours",
        "std",
        "95 %",
        "difference",
    ]
    title = f"{recipe.id}: {recipe.paper}, {recipe.place}"
    return TextTable(title, [*header, "verdict", "seeds", "read at"], lines, " ".join(note))


class Reproduced(NamedTuple):
    """The paper's number and ours, in percent."""

    published: Published | None
    ours: Spread | None  # None: not run
    difference: float | None
    verdict: str


def compared(published: Published | None, scores: Sequence[float], reduced: bool = False) -> Reproduced:
    if not scores:
        return Reproduced(published, None, None, "not run")
    ours = Spread.of(scores)
    if reduced or published is None:
        return Reproduced(published, ours, None, "reduced" if reduced else "-")
    difference = ours.mean - published.mean
    return Reproduced(published, ours, difference, MET if abs(difference) <= NEAR + 1e-9 else "off")


def published_text(published: Published | None) -> str:
    if published is None:
        return "-"
    return f"{published.mean:.2f}" + (f" ± {published.std:.2f}" if published.std is not None else "")


def line(published: Published | None, scores: Sequence[float], reduced: bool) -> list[str]:
    found = compared(published, scores, reduced)
    numbers = ("-", "-", "-") if found.ours is None else ["-" if v is None else f"{v:.2f}" for v in found.ours]
    difference = "-" if found.difference is None else f"{found.difference:+.2f}"
    return [published_text(published), *numbers, difference, found.verdict, str(len(scores))]


def which_clients(content: Mapping[str, Any]) -> str:
    """Identifies the clients of a result: the partition, and the seed if some clients are kept out of training."""
    kept_out = content["settings"].get("federation", {}).get("new_clients", 0)
    return f"{content.get('partition')}{content['seed'] if kept_out else ''}"


def tests(recipe: Recipe, rows: Sequence[RecipeRow], found: Found, value: Value, measure: str) -> list[TextTable]:
    """Paired tests of every row against the recipe's method, at one value; empty if that was not run."""
    samples = {
        row.name: {
            (which_clients(content), seed, client): accuracy
            for seed, content in found[row.name, value].items()
            for client, accuracy in accuracies(content, recipe.point(row, measure)).items()
        }
        for row in rows
    }
    samples = {name: own for name, own in samples.items() if own}
    if recipe.against not in samples or len(samples) < 2:
        return []
    where = [*(f"{name} {setting}" for name, setting in value), *([measure] if len(recipe.measures) > 1 else [])]
    title = ", ".join([f"{recipe.id}: paired tests, difference in points", *where])
    return [paired_tests(samples, recipe.against, title)]
