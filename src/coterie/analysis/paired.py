"""Paired tests of methods.

Runs of one client on one partition are not independent, whatever their seeds: its accuracies are averaged over seeds
first, and every client is one pair. Where each seed has its own partition, every partition is one pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.significance import Paired, holm, t_test, wilcoxon
from coterie.analysis.tables import TextTable
from coterie.core.errors import unknown
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale

ClientScores = Mapping[tuple[str, int, int], float]  # (checksum of the samples, seed, client) -> score
LEVEL = 0.05


class PairedVerdict(NamedTuple):
    """One method tested against another."""

    method: str
    difference: float  # of mean scores, as shown: of shares in points
    pairs: int
    p: float
    p_holm: float  # corrected for all methods that were tested
    at_5_percent: str  # better, worse, or no difference shown


def verdicts(
    samples: Mapping[str, ClientScores], against: str, metric: MetricScale = ACCURACY_SCALE
) -> tuple[list[PairedVerdict], str]:
    """Every other method tested against this one, and the test in words. Methods without common pairs are left out."""
    if against not in samples:
        raise unknown("method to test against", against, samples)
    keys = {key for own in samples.values() for key in own}
    partitions, seeds = len({content for content, _, _ in keys}), len({seed for _, seed, _ in keys})
    test, how = paired_by(partitions, seeds, metric)
    sign = 1 if metric.higher else -1
    differences = {
        name: pairs
        for name, own in samples.items()
        if name != against and (pairs := paired(own, samples[against], by_partition=partitions > 1))
    }
    found = {name: test([sign * value for value in values]) for name, values in differences.items()}
    corrected = dict(zip(found, holm([result.p for result in found.values()]), strict=True))
    return [
        PairedVerdict(
            name,
            metric.factor * sum(differences[name]) / len(differences[name]),
            len(differences[name]),
            result.p,
            corrected[name],
            ("better" if result.up else "worse") if corrected[name] < LEVEL else "no difference shown",
        )
        for name, result in found.items()
    ], how


def paired_tests(
    samples: Mapping[str, ClientScores], against: str, title: str, metric: MetricScale = ACCURACY_SCALE
) -> TextTable:
    """One line for every other method: its difference to `against`, and whether that is more than chance."""
    found, how = verdicts(samples, against, metric)
    return TextTable(
        title,
        ["method", f"against {against}", "pairs", "p", "p (Holm)", "at 5 %"],
        [[v.method, signed(v.difference, metric), str(v.pairs), p_value(v.p), p_value(v.p_holm), v[-1]] for v in found],
        f"{how} Two-sided; corrected by Holm for {len(found)} comparison{'s' if len(found) != 1 else ''}.",
    )


def signed(difference: float, metric: MetricScale) -> str:
    return f"{'' if difference < 0 else '+'}{metric.written(difference)}"


def paired_by(partitions: int, seeds: int, metric: MetricScale) -> tuple[Callable[[Sequence[float]], Paired], str]:
    """The test for this many partitions and seeds, and its description."""
    if partitions > 1:
        return t_test, (
            f"Paired t test of the mean {metric.words} over clients after the last round: the {partitions} partitions "
            "differ by seed, and each is one pair."
        )
    ranks = (
        f"Wilcoxon signed-rank test of the clients' {metric.words} after the last round. The larger rank sum decides "
        "better or worse."
    )
    if seeds > 1:
        return wilcoxon, (
            f"{ranks} Clients are the same in all {seeds} seeds: each is averaged over seeds and is one pair."
        )
    return wilcoxon, f"{ranks} Each client is one pair."


def paired(own: ClientScores, other: ClientScores, by_partition: bool) -> list[float]:
    """Differences where both have a value, averaged over seeds for each client, or over all clients of a partition."""
    groups: dict[Any, list[float]] = {}
    for key in own:
        if key in other:
            content, _, client = key
            groups.setdefault(content if by_partition else client, []).append(own[key] - other[key])
    return [sum(values) / len(values) for values in groups.values()]


def p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}" if p > 0 else "0"
