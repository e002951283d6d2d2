"""The noise between runs, pooled per dataset from all cells that were run several times."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from coterie.papers.recipes import Plan, Recipe
from coterie.papers.results import outcome
from coterie.papers.verdicts import DRAWS, SEEDS, Noises, RunNoise

if TYPE_CHECKING:
    from tools.ledger.files import Reading

UNSTABLE = 3.0  # cells with more than this many times the median standard deviation between seeds are left out
PICKED = (
    "readings-PFAKD-CIFAR10-even",
    "readings-PFAKD-FMNIST-even",
)  # their draw was searched for: clients differ less
Scores = dict[Any, float]  # what is repeated, a seed or a partition -> score


class Repeated(NamedTuple):
    """A cell that was run several times. Cells of one block share what is repeated, and are not independent."""

    block: str
    scores: Scores

    @property
    def variance(self) -> float:
        return statistics.variance(self.scores.values())

    @property
    def freedom(self) -> int:
        return len(self.scores) - 1


def setting(plan: Plan) -> str:
    """What the methods of a table share: everything but the method and the draw of the partition."""
    own = {name: value for name, value in plan.settings.items() if name not in ("method", "records")}
    own["partition"] = {name: value for name, value in own["partition"].items() if name != "seed"}
    return json.dumps(own, sort_keys=True)


class Measured(NamedTuple):
    """The noise per dataset and kind of repetition, and the settings in which several seeds were run."""

    noises: Noises
    settings: set[str]


def measured(repeated: Iterable[tuple[Recipe, str, Plan, Reading]]) -> Measured:
    """Runs that differ by the draw of a random partition only are draws of one cell."""
    groups: dict[tuple[str, ...], dict[str, Scores]] = {}  # -> partition -> seed -> score
    recipes: dict[str, Counter[str]] = {}  # setting -> those that have its runs
    for recipe, measure, plan, reading in repeated:
        content, average = reading.content, recipe.averages[measure]
        score = None if "early" in content else outcome(content, reading.point, recipe.report, average)
        if score is None or content["folder"] in PICKED:
            continue
        where, plain = setting(plan), json.dumps(plan.settings["method"], sort_keys=True)
        found = groups.setdefault((plan.dataset, where, plain, reading.point, recipe.report, average), {})
        found.setdefault(str(content["partition"]), {})[content["seed"]] = score
        recipes.setdefault(where, Counter())[content["folder"]] += 1
    cells: dict[tuple[str, str], dict[Any, Repeated]] = {}  # equal scores are one model measured at two points
    names: dict[tuple[str, str], set[str]] = {}
    several = set()
    for (dataset, where, *_), found in groups.items():
        means = {partition: math.fsum(seeds.values()) / len(seeds) for partition, seeds in found.items()}
        made = [(SEEDS, partition, seeds) for partition, seeds in found.items()]
        for kind, block, scores in [*made, (DRAWS, where, means)]:
            if len(scores) > 1:
                same = tuple(round(score, 6) for score in scores.values())
                cells.setdefault((dataset, kind), {})[same] = Repeated(block, scores)
                names.setdefault((dataset, kind), set()).add(recipes[where].most_common(1)[0][0])
                several |= {where} if kind == SEEDS else set()
    pools = {SEEDS: pooled, DRAWS: over_draws}
    noises = {
        key: pools[key[1]](list(own.values()))._replace(measured_in=tuple(sorted(names[key])))
        for key, own in sorted(cells.items())
    }
    return Measured(noises, several)


def pooled(cells: Sequence[Repeated]) -> RunNoise:
    """The standard deviation within cells that are not unstable, with its effective degrees of freedom."""
    most = UNSTABLE**2 * statistics.median(cell.variance for cell in cells)
    stable = [cell for cell in cells if cell.variance <= most]
    total = sum(cell.freedom for cell in stable)
    variance = math.fsum(cell.variance * cell.freedom for cell in stable) / total
    return RunNoise(math.sqrt(variance), max(int(effective(stable)), 1), len(stable))


def effective(cells: Sequence[Repeated]) -> float:
    """Degrees of freedom of a pooled variance, by Satterthwaite: 2 (E V)² / Var V.

    A seed moves several methods alike, so cells with the same seeds tell less than independent ones. The covariances of
    the cells are those of their scores.
    """
    found = math.fsum(cell.variance * cell.freedom for cell in cells)
    spread = math.fsum(shared(a, b) for a, b in product(cells, cells) if a.block == b.block)
    return found**2 / spread if spread else float(sum(cell.freedom for cell in cells))


def shared(a: Repeated, b: Repeated) -> float:
    """The contribution of two cells to Var V: their squared covariance, times the trace of the two centerings."""
    both = a.scores.keys() & b.scores.keys()
    k, n, m = len(both), len(a.scores), len(b.scores)
    trace = k - k / n - k / m + k**2 / (n * m)
    if trace < 1e-9:
        return 0.0
    left, right = (statistics.fmean(cell.scores.values()) for cell in (a, b))
    return math.fsum((a.scores[i] - left) * (b.scores[i] - right) for i in both) ** 2 / trace


def over_draws(cells: Sequence[Repeated]) -> RunNoise:
    """The standard deviation between partitions. All methods of a setting share its partitions, so that each setting
    counts with its number of partitions less one, whatever the number of its cells."""
    total, variances = 0, []
    for block in dict.fromkeys(cell.block for cell in cells):
        own = [cell for cell in cells if cell.block == block]
        freedom = len({partition for cell in own for partition in cell.scores}) - 1
        variances.append(freedom * statistics.fmean(cell.variance for cell in own))
        total += freedom
    return RunNoise(math.sqrt(math.fsum(variances) / total), total, len(cells))
