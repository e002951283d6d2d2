"""The files of a leaderboard as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.analysis.leaderboard import (
    COMPLETE,
    FAILED,
    NOT_RUN,
    PARTIAL,
    REFUSED,
    Board,
    BoardBenchmark,
    BoardCell,
    SeedOutcome,
)
from coterie.analysis.outcomes import title
from coterie.core.metric_scale import ACCURACY_SCALE
from coterie.papers.leaderboard.files import Contents, FileKey, metric_of
from coterie.papers.leaderboard.rules import Benchmark, BoardRules, own_range
from coterie.papers.results import origins


def summary(rules: BoardRules, found: Contents, benchmarks: Sequence[Benchmark], methods: Sequence[str]) -> Board:
    """The leaderboard of these benchmarks and methods; what has no file is shown as not run."""
    shown = {b.id for b in benchmarks}
    used = [content for key, content in found.items() if key.benchmark in shown and key.method in methods]
    return Board(
        benchmarks=[BoardBenchmark(b.id, b.text, b.draws) for b in benchmarks],
        methods=[title(method) for method in methods],
        cells={(b.id, title(m)): cell(rules, found, b.id, m) for b in benchmarks for m in methods},
        trials=rules.trials,
        seeds=rules.seeds,
        validation=rules.validation,
        spaces={
            title(m): "; ".join(f"{name} {own_range(values)}" for name, values in rules.space_of(m).items())
            for m in methods
        },
        origins={kind: values for kind, values in origins(used).items() if kind != "partition"},
    )


def all_methods(rules: BoardRules, found: Contents) -> list[str]:
    """Those of the rules, then all others that have a file."""
    return list(dict.fromkeys((*rules.methods, *(key.method for key in found))))


def cell(rules: BoardRules, found: Contents, benchmark: str, method: str) -> BoardCell:
    tuning = found.get(FileKey(benchmark, method, None))
    if tuning is None:
        return BoardCell(NOT_RUN, "", None, "", {}, ACCURACY_SCALE)
    for status in (REFUSED, FAILED):
        if tuning.get(status):
            return BoardCell(status, tuning[status], None, "", {}, ACCURACY_SCALE)
    metric = metric_of(tuning["metric"])
    files = {seed: content for seed in rules.seeds if (content := found.get(FileKey(benchmark, method, seed)))}
    failed = [f"seed {seed}: {content['failed']}" for seed, content in files.items() if content.get("failed")]
    seeds = {seed: outcome(content) for seed, content in files.items() if not content.get("failed")}
    status = FAILED if failed else COMPLETE if len(seeds) == len(rules.seeds) else PARTIAL if seeds else NOT_RUN
    return BoardCell(status, "; ".join(failed), tuning["settings"], tuning["measured"], seeds, metric)


def outcome(content: dict[str, Any]) -> SeedOutcome:
    return SeedOutcome(
        tuple(content["scores"]),
        content["calibration"],
        (content["bytes_up"] + content["bytes_down"]) / 1e6,
        content["seconds"],
        "jobs" in content["hardware"],
    )
