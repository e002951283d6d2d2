"""Find tables of a run folder that end too early, by comparing them with its other files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coterie.federation.history import POINTS
from coterie.report.naming import results
from coterie.runs.record import integer
from coterie.runs.stored_run import StoredRun
from coterie.runs.tables import Score

EQUAL = 2e-6  # shares in metrics.csv have six digits
ALL = ("pre", "finished", "kept", "global")  # points at which all clients are measured, participants or not


def shortfalls(run: StoredRun) -> list[str]:
    """One phrase for each table that is incomplete. `run.missing` reports unreadable files."""
    checks: dict[str, Callable[[StoredRun], Iterator[str]]] = {
        "metrics.csv": short_metrics,
        "clients.csv": short_clients,
        "classes.csv": short_classes,
    }
    read = [name for name in checks if not any(problem.startswith(name) for problem in run.missing)]
    return [f"{name} {words}" for name in read for words in dict.fromkeys(checks[name](run))]


def short_metrics(run: StoredRun) -> Iterator[str]:
    last = max(run.rounds, default=0)
    rounds = max([integer((run.result or {}).get("rounds")), *run.client_table.measured.values()])
    if last < rounds:
        yield f"ends after round {last} of {rounds}"
    elif any(not run.curve(point) for point in POINTS if has_mean(run, point)):
        yield "lacks the measurements after the last round"


def has_mean(run: StoredRun, point: str) -> bool:
    """Whether result.json has the mean score at this point."""
    found = [o.get("last") for o in results(run) if o.get("measured") == POINTS[point]]
    return any(isinstance(last, dict) and last.get("mean") is not None for last in found)


def short_clients(run: StoredRun) -> Iterator[str]:
    for point in run.measured:
        number, mean = run.curve(point)[-1]
        read, scores = run.client_table.measured.get(point, 0), run.last_scores.get(point, [])
        few = point in ALL and len(scores) < clients_tested(run)
        off = abs(mean_of(scores) - mean / run.metric.factor) > EQUAL * (1.0 if run.metric.share else abs(mean) + 1)
        if read < number or few or (read == number and off):
            yield f"does not have all clients of round {max(read, number):.0f}"


def clients_tested(run: StoredRun) -> int:
    """How many clients have test samples; 0 if unknown, or if clients are devices, which may drop out."""
    sizes = run.section("data").get("test_sizes")
    return sum(map(bool, sizes)) if isinstance(sizes, list) and "deployment" not in run.config else 0


def mean_of(scores: Sequence[Score]) -> float:
    return sum(s.value for s in scores) / max(len(scores), 1)


def short_classes(run: StoredRun) -> Iterator[str]:
    found, clients = len(run.class_table.counts) if run.class_table else 0, len(run.client_ids)
    if found < clients and run.section("data").get("classes") != 0:
        yield f"has {found} of {clients} clients"
