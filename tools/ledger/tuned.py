"""The tuned leaderboard of docs/leaderboard.md, from the files that `coterie leaderboard` writes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from coterie.analysis.leaderboard import Board, BoardCell, verdict
from coterie.analysis.ranking import Ranking
from coterie.papers.leaderboard import BoardFolder, all_methods, read_rules, summary
from coterie.report.leaderboard import WIDE, diagram
from coterie.report.markup import Markup, tag
from coterie.report.page import asset
from tools.ledger.readme import table

FOLDER = "leaderboard"
PICTURE = "leaderboard.svg"
DETAILS = ["method", "accuracy", "worst tenth", "calibration error", "MB sent", "seconds", "tuned to"]


@cache
def read(folder: Path) -> tuple[Board, list[str]]:
    """The leaderboard of a folder of results, and the benchmarks that have none."""
    rules = read_rules()
    found = BoardFolder(folder / FOLDER, rules).load()
    run = {key.benchmark for key in found}
    benchmarks = [benchmark for benchmark in rules.benchmarks if benchmark.id in run]
    missing = [benchmark.id for benchmark in rules.benchmarks if benchmark.id not in run]
    return summary(rules, found, benchmarks, all_methods(rules, found)), missing


def exists(folder: Path) -> bool:
    return (folder / FOLDER).is_dir()


def blocks(folder: Path) -> dict[str, str]:
    """Mark -> text."""
    board, missing = read(folder)
    return {"tuned": "\n\n".join(text for text in (*overview(board, missing), *details(board)) if text)}


def picture(folder: Path) -> str | None:
    """The critical-difference diagram; None without a test."""
    found = read(folder)[0].ranking
    return standalone(found) if found and found.test else None


def overview(board: Board, missing: list[str]) -> list[str]:
    drawn = f"![Critical-difference diagram: average ranks](pictures/{PICTURE})" if board.ranking else ""
    header = ["method", "rank", *(benchmark.id for benchmark in board.benchmarks)]
    refused = "\n".join(f"- **{method}** on {benchmark}: {reason}" for method, benchmark, reason in board.reasons)
    left = f"Not run yet: {', '.join(missing)}." if missing else ""
    about = (
        f"{len(board.benchmarks)} benchmarks; {board.trials} settings tried for every method and benchmark, "
        f"{len(board.seeds)} seeds. Accuracy in percent, mean over seeds ± half of the 95 % interval."
    )
    return [about, verdict(board.ranking), drawn, table(header, board.rows()), refused, left, made(board)]


def made(board: Board) -> str:
    """Provenance in a line."""
    return "Provenance: " + "; ".join(f"{kind} {', '.join(values)}" for kind, values in board.origins.items()) + "."


def details(board: Board) -> list[str]:
    found = []
    for benchmark in board.benchmarks:
        own = {method: board.cells[benchmark.id, method] for method in board.methods}
        shown = sorted((m for m in own if own[m].mean), key=lambda m: -(own[m].mean or (0.0,))[0])
        rows = [line(method, own[method]) for method in shown]
        drawn = "Every seed draws its own partition." if benchmark.draws else "The partition is given by the data."
        if rows:
            found.append(f"### {benchmark.id}\n\n{benchmark.text}. {drawn}\n\n{table(DETAILS, rows)}")
    return found


def line(method: str, cell: BoardCell) -> list[str]:
    settings = " ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in (cell.settings or {}).items()
    )
    return [
        method,
        cell.text,
        cell.metric.number(cell.worst),
        "-" if cell.calibration is None else f"{100 * cell.calibration:.2f}",
        f"{cell.megabytes:.2f}",
        f"{cell.seconds:.1f}",
        f"`{settings}`",
    ]


def standalone(found: Ranking) -> str:
    """The diagram as an SVG file of its own."""
    drawn = diagram(found, xmlns="http://www.w3.org/2000/svg", width=WIDE)
    style = tag("style", Markup(asset("charts.css") + asset("leaderboard.css")))
    ground = tag("rect", width="100%", height="100%", rx=8, style="fill: var(--card)")
    start, end = drawn.split("</desc>", 1)
    return f"{start}</desc>{style}{ground}{end}\n"
