"""The noise between runs, pooled per dataset from all cells that were run several times."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

from coterie.papers.recipes import Recipe
from coterie.papers.results import outcome
from coterie.papers.verdicts import DRAWS, SEEDS, Noises, RunNoise

if TYPE_CHECKING:
    from tools.ledger.files import Reading

UNSTABLE = 3.0  # cells with more than this many times the median standard deviation are left out


def measured(repeated: Iterable[tuple[Recipe, str, Reading]]) -> Noises:
    """Dataset and kind of repetition -> pooled standard deviation. Runs that differ by the draw of a random partition
    only are draws of one cell."""
    groups: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}  # -> partition -> seed -> score
    for recipe, measure, reading in repeated:
        content, average = reading.content, recipe.averages[measure]
        score = None if "early" in content else outcome(content, reading.point, recipe.report, average)
        if score is None:
            continue
        settings = {**content["settings"], "partition": dict(content["settings"]["partition"])}
        settings["partition"].pop("seed", None)
        plain = json.dumps(settings, sort_keys=True)
        found = groups.setdefault((settings["dataset"], plain, reading.point, recipe.report, average), {})
        found.setdefault(str(content["partition"]), {})[content["seed"]] = score
    cells: dict[tuple[str, str], set[tuple[float, ...]]] = {}  # equal scores are one model measured at two points
    for (dataset, *_), found in groups.items():
        for seeds in found.values():
            cells.setdefault((dataset, SEEDS), set()).add(tuple(round(s, 6) for s in seeds.values()))
        means = tuple(round(math.fsum(seeds.values()) / len(seeds), 6) for seeds in found.values())
        cells.setdefault((dataset, DRAWS), set()).add(means)
    pools = {key: pooled(cell for cell in own if len(cell) > 1) for key, own in sorted(cells.items())}
    return {key: noise for key, noise in pools.items() if noise}


def pooled(cells: Iterable[tuple[float, ...]]) -> RunNoise | None:
    """The standard deviation within cells, each the scores of its runs; None without cells."""
    spreads = [(statistics.variance(cell), len(cell) - 1) for cell in cells]
    if not spreads:
        return None
    most = UNSTABLE**2 * statistics.median(variance for variance, _ in spreads)
    stable = [(variance, freedom) for variance, freedom in spreads if variance <= most]
    total = sum(freedom for _, freedom in stable)
    return RunNoise(math.sqrt(math.fsum(v * f for v, f in stable) / total), total, len(stable))
