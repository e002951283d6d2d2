"""The tables of the README, in both languages."""

from __future__ import annotations

from typing import NamedTuple

from coterie.analysis.tables import TextTable, markdown
from coterie.core.errors import CoterieError
from coterie.federation.history import worst_tenth
from coterie.papers.results import accuracies
from coterie.papers.tables import NEAR, published_text
from tools.ledger.files import Files
from tools.ledger.sections import Cell, cells, ours_text

DEMO = "demo"
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
    spread: str
    within: str
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
        spread="± is half of the 95 % confidence interval over three seeds; rows without it have one or two seeds",
        within="{here} of these {shown} numbers, and {all} of all {measured} measured so far, are within {near} points "
        "of the paper. [Commits, hardware and precision](docs/results.md) of every number.",
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
        spread="± 为三个种子的 95 % 置信区间半宽；没有 ± 的行只有一个或两个种子",
        within="上表 {shown} 个数字中有 {here} 个与论文相差不超过 {near} 个百分点；"
        "迄今测得的全部 {measured} 个数字中有 {all} 个。[每个数字的提交、硬件和精度](docs/results.md)。",
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
        header += [f"{name}{words.colon}{words.published}", words.ours, words.difference]
        by_name = {cell.row.name: cell for cell in found}
        for method, row in rows.items():
            row += texts(by_name[method]) if method in by_name else ["-"] * 3
    notes = []
    if any("±" in ours_text(cell) for found in made.values() for cell in found):
        notes.append(words.spread)
    notes.append(verdicts(files, [cell for found in made.values() for cell in found], words))
    return f"{table(header, list(rows.values()))}\n\n{words.stop.join(notes)}"


def texts(cell: Cell) -> list[str]:
    found = cell.comparison
    return [
        published_text(found.published),
        ours_text(cell),
        "-" if found.difference is None else f"{found.difference:+.2f}",
    ]


def verdicts(files: Files, shown: list[Cell], words: Words) -> str:
    """Count the numbers that are met. One in several tables counts once; our own recipes do not count."""
    every = {
        (cell.comparison, id(cell.readings[0].content), cell.readings[0].point): cell.met
        for recipe in files.recipes
        if recipe.id not in files.own
        for cell in cells(files, recipe)
        if cell.comparison.difference is not None
    }
    here = [cell.met for cell in shown if cell.comparison.difference is not None]
    return words.within.format(near=NEAR, here=sum(here), shown=len(here), all=sum(every.values()), measured=len(every))


def table(header: list[str], rows: list[list[str]]) -> str:
    return markdown(TextTable("", header, rows)).strip().split("\n", 2)[2]
