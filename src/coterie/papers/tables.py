"""Tables of published numbers next to ours, with verdicts and paired tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coterie.analysis.paired import paired_tests
from coterie.analysis.tables import TextTable
from coterie.api import VARY
from coterie.papers.recipes import Plan, Published, Recipe, RecipeRow, Value
from coterie.papers.recipes.recipe import REPORTS
from coterie.papers.results import Found, accuracies, outcome
from coterie.papers.verdicts import DRAWS, SEEDS, WIDEST, Noises, Reproduced, independent, judged, measured_noise


def report(recipe: Recipe, rows: Sequence[RecipeRow], found: Found) -> list[TextTable]:
    """Published numbers next to ours, then paired tests."""
    tables = [comparison(recipe, rows, found)]
    for value in recipe.values:
        for measure in recipe.measures:
            tables += tests(recipe, rows, found, value, measure)
    return tables


def counting(averages: dict[str, str]) -> str:
    """Describe what has equal weight in the mean."""
    if len(set(averages.values())) == 1:
        return f"mean over {next(iter(averages.values()))}"
    return ", ".join(f"{measure}: mean over {average}" for measure, average in averages.items())


def compared(
    recipe: Recipe,
    row: RecipeRow,
    value: Value,
    measure: str,
    plan: Plan,
    contents: Iterable[dict[str, Any]],
    noises: Noises,
) -> Reproduced:
    """The verdict on one number, from results of its training (`plan`) with several seeds."""
    average, point = recipe.averages[measure], recipe.point(row, measure)
    made = [(outcome(c, point, recipe.report, average), c) for c in contents]
    scores = [(score, str(c.get("partition"))) for score, c in made if score is not None]
    reduced = any(c.get("rounds", plan.federation.rounds) != plan.federation.rounds for _, c in made)
    noise = noises.get((plan.dataset, DRAWS if plan.drawn else SEEDS))
    return judged(row.published.get(value, {}).get(measure), independent(scores, plan.drawn), noise, reduced)


def comparison(recipe: Recipe, rows: Sequence[RecipeRow], found: Found) -> TextTable:
    several = len(recipe.measures) > 1
    lines = []
    for row in rows:
        for value in recipe.values:
            for measure in recipe.measures:
                contents = found[row.name, value].values()
                plan = recipe.plan(row, value)
                numbers = line(compared(recipe, row, value, measure, plan, contents, measured_noise()), len(contents))
                settings = [str(setting) for _, setting in value]
                reading = [row.reading.kind, recipe.point(row, measure)]
                lines.append([row.name, *settings, *([measure] if several else []), *numbers, *reading])
    note = [
        f"Accuracy in percent, {REPORTS[recipe.report]}; {counting(recipe.averages)}. ±: half of the 95 % interval of "
        "the mean, from these runs if there are five, else from the noise measured on this dataset. "
        "Verdict: met if the interval lies within the band around the published number, off if it lies outside, "
        f"undecided otherwise; the band is at most {WIDEST} points. Reduced: the rounds are not the paper's, so the "
        "numbers are not comparable.",
        *(["Every seed has its own partition."] if recipe.partition.get("seed") == VARY else []),
        *recipe.notes,
    ]
    header = ["method", *recipe.vary, *(["measure"] if several else []), "published", "ours", "std", "±", "difference"]
    title = f"{recipe.id}: {recipe.paper}, {recipe.place}"
    return TextTable(title, [*header, "band", "verdict", "seeds", "reading", "read at"], lines, " ".join(note))


def published_text(published: Published | None) -> str:
    if published is None:
        return "-"
    return f"{published.mean:.2f}" + (f" ± {published.std:.2f}" if published.std is not None else "")


def line(found: Reproduced, seeds: int) -> list[str]:
    numbers = ("-", "-", "-") if found.ours is None else ["-" if v is None else f"{v:.2f}" for v in found.ours]
    difference = "-" if found.difference is None else f"{found.difference:+.2f}"
    band = "-" if found.band is None else f"{found.band:.2f}"
    return [published_text(found.published), *numbers, difference, band, found.verdict, str(seeds)]


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
