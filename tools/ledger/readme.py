"""The tables of the README, in both languages."""

from __future__ import annotations

from typing import NamedTuple

from coterie.analysis.tables import TextTable, markdown
from coterie.core.errors import CoterieError
from coterie.federation.history import worst_tenth
from coterie.papers.results import accuracies
from coterie.papers.tables import published_text
from tools.ledger.coverage import Tally, chance, every, held_out, once
from tools.ledger.files import Files
from tools.ledger.overview import named
from tools.ledger.sections import Cell, cells, ours_text

DEMO = "demo"
WORST = 5  # rows with the largest differences
SHOWN = {"Fashion-MNIST": "P1-T1-FMNIST-20", "CIFAR-10": "P1-T1-CIFAR10-20"}


class Words(NamedTuple):
    """The texts of one language."""

    method: str
    accuracy: str
    worst: str
    published: str
    ours: str
    difference: str
    demo: str
    verdict: str
    spread: str
    within: str
    worst_rows: str
    colon: str
    stop: str


WORDS = {
    "README.md": Words(
        method="method",
        accuracy="accuracy",
        worst="worst 10 % ({} of {} clients)",
        published="published",
        ours="ours",
        difference="difference",
        demo="Recipe `demo`, seed 0, two CPU cores.",
        verdict="verdict",
        spread="± is half of the 95 % interval of our mean. *Met*: the interval lies within the band around the "
        "published number (at most ± 1.5 points, less on datasets with less noise between seeds); *off*: it lies "
        "outside; *undecided*: neither, more seeds are needed",
        within="Five papers print {different} different numbers; {run} of them were run. Held out, that is without "
        "the numbers on which we chose among several readings of a paper, {met} of {held} are met, {off} are off and "
        "{undecided} are undecided; {chance:.0f} of these {held} would be met by chance. [Every number with its "
        "reading, seeds, commit and hardware](docs/results.md); [do the papers' claims hold?](docs/claims.md)",
        worst_rows="The largest misses of all tables: {rows}",
        colon=": ",
        stop=". ",
    ),
    "README.zh.md": Words(
        method="方法",
        accuracy="准确率",
        worst="最差 10 %({}/{} 客户端)",
        published="论文",
        ours="本项目",
        difference="差值",
        demo="配方 `demo`，种子 0，两个 CPU 核心。",
        verdict="结论",
        spread="± 为均值 95 % 置信区间的半宽。*met*（一致）：区间落在论文数字周围的允许带内（最多 ± 1.5 个百分点，"
        "种子噪声小的数据集更窄）；*off*（不一致）：区间完全在带外；*undecided*（未定）：两者都不是，需要更多种子",
        within="五篇论文共印有 {different} 个不同的数字，已运行 {run} 个。除去用来选择论文解读的单元格后，"
        "{held} 个中 {met} 个一致，{off} 个不一致，{undecided} 个未定；"
        "若纯属偶然，这 {held} 个中约有 {chance:.0f} 个一致。"
        "[每个数字的解读、种子、提交和硬件](docs/results.md)；[论文的结论成立吗？](docs/claims.md)",
        worst_rows="所有表格中偏差最大的行：{rows}",
        colon="：",
        stop="。",
    ),
}


def blocks(files: Files, words: Words) -> dict[str, str]:
    return {"demo": demo(files, words), "results": results(files, words)}


def shown(files: Files, name: str) -> list[Cell]:
    """The measured cells of a recipe."""
    made = [cell for cell in cells(files, files.recipe(name)) if cell.comparison.ours]
    if not made:
        raise CoterieError(f"{files.folder} has no results of {name}, which the README shows")
    return made


def demo(files: Files, words: Words) -> str:
    """Accuracy over all clients and over the worst tenth."""
    made = shown(files, DEMO)
    rows = [[cell.row.name, ours_text(cell), f"{worst(cell):.2f}"] for cell in made]
    clients = max(len(accuracies(r.content, r.point)) for cell in made for r in cell.readings)
    header = [words.method, words.accuracy, words.worst.format(worst_tenth(clients), clients)]
    return f"{table(header, rows)}\n\n{words.demo}"


def worst(cell: Cell) -> float:
    """Mean accuracy of the worst tenth of the clients, at least one, in percent; mean over seeds."""
    found = [sorted(accuracies(r.content, r.point).values()) for r in cell.readings]
    worst = [a[: worst_tenth(len(a))] for a in found]
    return sum(100 * sum(a) / len(a) for a in worst) / len(worst)


def results(files: Files, words: Words) -> str:
    """All methods of Table 1, with both datasets side by side."""
    made = {name: shown(files, recipe) for name, recipe in SHOWN.items()}
    names = dict.fromkeys(cell.row.name for found in made.values() for cell in found)
    header, rows = [words.method], {name: [name.removesuffix("-only")] for name in names}
    for name, found in made.items():
        header += [f"{name}{words.colon}{words.published}", words.ours, words.difference, words.verdict]
        by_name = {cell.row.name: cell for cell in found}
        for method, row in rows.items():
            row += texts(by_name[method]) if method in by_name else ["-"] * 4
    notes = [words.spread, verdicts(files, words), worst_rows(files, words)]
    return f"{table(header, list(rows.values()))}\n\n{words.stop.join(notes)}{words.stop.strip()}"


def texts(cell: Cell) -> list[str]:
    found = cell.comparison
    return [
        published_text(found.published),
        ours_text(cell),
        "-" if found.difference is None else f"{found.difference:+.2f}",
        found.verdict,
    ]


def verdicts(files: Files, words: Words) -> str:
    """How many of the printed numbers were run, and how many are met held out."""
    whole, held = Tally.of(every(files)), Tally.of(held_out(files))
    return words.within.format(
        different=whole.all,
        run=whole.run,
        held=held.run,
        met=held.met,
        off=held.off,
        undecided=held.undecided,
        chance=chance(files, held_out(files)),
    )


def worst_rows(files: Files, words: Words) -> str:
    found = [cell for cell in once(every(files)) if cell.comparison.difference is not None]
    found.sort(key=lambda cell: -abs(cell.comparison.difference or 0.0))
    shown = [f"{c.recipe.id} {named(c)} {c.comparison.difference:+.1f}" for c in found[:WORST]]
    return words.worst_rows.format(rows=", ".join(shown))


def table(header: list[str], rows: list[list[str]]) -> str:
    return markdown(TextTable("", header, rows)).strip().split("\n", 2)[2]
