"""The page of a leaderboard: one self-contained HTML file, whose tables sort by any column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coterie.analysis.leaderboard import RANKS_NOTE, Board, BoardCell, verdict
from coterie.analysis.ranking import Ranking
from coterie.core.errors import CoterieError
from coterie.report import charts
from coterie.report.charts import Axis
from coterie.report.elements import figure, paragraph, section, table
from coterie.report.markup import Markup, join, number, tag
from coterie.report.page import document, write_page

WIDE, LINE, TOP = 620, 24, 62
DIAGRAM = (
    "Average ranks, the best on the left. A bar connects methods whose ranks do not differ significantly "
    "(Nemenyi, 5 %); CD is the critical difference."
)


class SortableCell(NamedTuple):
    """Text, and the number to sort by; None: the text says why there is none."""

    text: str
    value: float | None


class SortColumn(NamedTuple):
    name: str
    descending: bool = False  # on the first click


def write_board(board: Board, path: Path) -> Path:
    """Write the page atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CoterieError(f"{path} cannot be written: {error.strerror}") from None
    return write_page(page(board), path)


def page(board: Board) -> str:
    title = "Coterie leaderboard"
    facts = (
        f"{len(board.methods)} methods · {len(board.benchmarks)} benchmarks · {board.trials} settings tried for each · "
        f"{len(board.seeds)} seeds"
    )
    parts = {
        "overview": ("Overview", overview(board)),
        "benchmarks": ("Benchmarks", [one for b in board.benchmarks for one in benchmark(board, b.id)]),
        "gaps": ("Refused and failed", gaps(board)),
        "rules": ("How it was made", rules(board)),
    }
    made = [section(name, heading, *content) for name, (heading, content) in parts.items() if content]
    links = [tag("a", heading, href=f"#{name}") for name, (heading, content) in parts.items() if content]
    top = tag("header", tag("h1", title), tag("p", facts, class_="facts"), tag("nav", *links, aria_label="Parts"))
    foot = tag("footer", tag("p", "Made by Coterie from result files. Scores are on test samples."))
    return document(title, join(top, tag("main", *made), foot), more="leaderboard")


def overview(board: Board) -> list[Markup]:
    found = board.ranking
    ranks = found.ranks if found else {}
    columns = [SortColumn("method"), SortColumn("rank"), *(SortColumn(b.id, descending=True) for b in board.benchmarks)]
    rows = [
        [
            SortableCell(m, None),
            SortableCell(f"{ranks[m]:.2f}", ranks[m]) if m in ranks else SortableCell("-", None),
            *(mean_cell(board.cells[b.id, m]) for b in board.benchmarks),
        ]
        for m in board.order
    ]
    made = [paragraph(verdict(found)), sortable("Rank and mean over seeds", columns, rows), paragraph(RANKS_NOTE)]
    return [*([figure(DIAGRAM, diagram(found))] if found and found.test else []), *made]


def mean_cell(cell: BoardCell) -> SortableCell:
    return SortableCell(cell.text, cell.mean.mean if cell.mean else None)


def benchmark(board: Board, name: str) -> list[Markup]:
    """One table with all numbers of a benchmark, best first."""
    about = next(b for b in board.benchmarks if b.id == name)
    cells = {m: board.cells[name, m] for m in board.methods}
    metric = next((cell.metric for cell in cells.values() if cell.mean), next(iter(cells.values())).metric)
    columns = [
        SortColumn("method"),
        SortColumn(metric.heading, metric.higher),
        SortColumn("worst tenth", metric.higher),
        SortColumn("calibration error, %"),
        SortColumn("MB sent"),
        SortColumn("seconds"),
        SortColumn("seeds", descending=True),
        SortColumn("tuned to"),
    ]
    sign = -1 if metric.higher else 1
    order = sorted(cells, key=lambda m: sign * spread.mean if (spread := cells[m].mean) else float("inf"))
    rows = [details(m, cells[m]) for m in order]
    drawn = "Every seed draws its own partition." if about.draws else "The partition is given by the data."
    return [tag("h3", name), paragraph(f"{about.text}. {drawn}", class_="small"), sortable(name, columns, rows)]


def details(method: str, cell: BoardCell) -> list[SortableCell]:
    settings = " ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in (cell.settings or {}).items()
    )

    def numeric(value: float | None, text: str) -> SortableCell:
        return SortableCell("-" if value is None else text, value)

    shared = any(one.shared for one in cell.seeds.values())
    return [
        SortableCell(method, None),
        mean_cell(cell),
        numeric(cell.worst, cell.metric.number(cell.worst)),
        numeric(cell.calibration, f"{100 * (cell.calibration or 0):.2f}"),
        numeric(cell.megabytes, f"{cell.megabytes or 0:.2f}"),
        numeric(cell.seconds, f"{cell.seconds or 0:.1f}{' *' if shared else ''}"),
        SortableCell(str(len(cell.seeds)), len(cell.seeds)),
        SortableCell(settings or cell.status, None),
    ]


def sortable(caption: str, columns: Sequence[SortColumn], rows: Sequence[Sequence[SortableCell]]) -> Markup:
    """A table whose column headings are buttons."""
    heads = [
        tag(
            "th", tag("button", column.name, type="button"), scope="col",
            data_first="descending" if column.descending else "ascending",
        )
        for column in columns
    ]  # fmt: skip
    lines = [tag("tr", tag("th", row[0].text, scope="row"), *(_sortable_cell(one) for one in row[1:])) for row in rows]
    made = tag(
        "table", tag("caption", tag("span", caption)), tag("thead", tag("tr", *heads)), tag("tbody", *lines),
        data_sortable=True, class_="sortable",
    )  # fmt: skip
    return tag("div", made, class_="wide", tabindex="0", role="region", aria_label=caption)


def _sortable_cell(cell: SortableCell) -> Markup:
    value = None if cell.value is None else repr(cell.value)
    return tag("td", cell.text, data_value=value, class_="gap" if value is None else None)


def gaps(board: Board) -> list[Markup]:
    rows = [list(row) for row in board.reasons]
    return [table("Cells without a number", ["method", "benchmark", "reason"], rows, words=True)] if rows else []


def rules(board: Board) -> list[Markup]:
    share = f"{100 * board.validation:g} %"
    seeds = ", ".join(map(str, board.seeds))
    about = (
        f"Every method tries {board.trials} settings on every benchmark: its own defaults first, then random ones of "
        f"its space. A setting trains once, on a partition that no result uses, and is scored on {share} of each "
        "client's training samples; test samples are not used. The best setting is trained again on all training "
        f"samples with seeds {seeds}. worst tenth: mean of the worst 10 % of clients. MB sent: both directions, all "
        "rounds and clients. seconds: of a training; * others ran on the machine at the same time. calibration error: "
        "of the models that a run keeps; - where the score is of other models."
    )
    spaces = table("What tuning searches", ["method", "settings"], [list(s) for s in board.spaces.items()], words=True)
    origin = [[kind, "; ".join(values)] for kind, values in board.origins.items()]
    return [paragraph(about), spaces, *([table("Provenance", ["", ""], origin, words=True)] if origin else [])]


def diagram(found: Ranking, **more: str | float) -> Markup:
    """The critical-difference diagram of Demšar (2006)."""
    assert found.test is not None
    names, count = list(found.ranks), len(found.ranks)
    x = Axis(1, count, 120, WIDE - 120)
    groups = found.groups
    half = (count + 1) // 2
    first = TOP + 14 + 11 * len(groups)  # of the names
    ticks = [
        join(tag("line", x1=x(r), x2=x(r), y1=TOP - 8, y2=TOP, class_="tick"), charts.text(x(r), TOP - 13, str(r)))
        for r in range(1, count + 1)
    ]
    parts = [tag("line", x1=x(1), x2=x(count), y1=TOP, y2=TOP, class_="tick"), *ticks, *_critical(x, found, count)]
    for row, group in enumerate(groups):
        y = TOP + 12 + 11 * row
        ends = (x(found.ranks[group[0]]) - 4, x(found.ranks[group[-1]]) + 4)
        parts.append(tag("line", x1=ends[0], x2=ends[1], y1=y, y2=y, class_="bar-of"))
    for place, name in enumerate(names):
        left = place < half
        y = first + LINE * (place + 1 if left else count - place)
        end, anchor = (112, "end") if left else (WIDE - 112, "start")
        at = x(found.ranks[name])
        parts += [
            tag("path", d=f"M{number(at)} {TOP}V{number(y)}H{end}", class_="to"),
            tag("circle", cx=at, cy=TOP, r=3, class_="dot"),
            charts.text(end - 6 if left else end + 6, y + 4, f"{name} {found.ranks[name]:.2f}", anchor, "strong"),
        ]
    about = "; ".join(f"{name} {rank:.2f}" for name, rank in found.ranks.items())
    return charts.svg(
        "Critical-difference diagram", about, WIDE, first + LINE * (half + 1), *parts, class_="cd", **more
    )


def _critical(x: Axis, found: Ranking, count: int) -> list[Markup]:
    assert found.test is not None
    long = x(1 + min(found.test.critical, count - 1))
    ends = [tag("line", x1=at, x2=at, y1=14, y2=22, class_="tick") for at in (x(1), long)]
    line = tag("line", x1=x(1), x2=long, y1=18, y2=18, class_="tick")
    return [line, *ends, charts.text((x(1) + long) / 2, 11, f"CD = {found.test.critical:.2f}", class_="axis")]
