"""The tables of the README, in each of its languages."""

from __future__ import annotations

from typing import NamedTuple

from coterie.core.errors import CoterieError
from coterie.ledger.files import Files
from coterie.ledger.sections import Cell, cells, contents, ours_text
from coterie.reproduce import NEAR, published_text
from coterie.results import accuracies, origins, seconds_alone, seeds
from coterie.tables import Table, markdown

DEMO = "demo"
SHOWN = {"Fashion-MNIST": "P1-T1-FMNIST-20", "CIFAR-10": "P1-T1-CIFAR10-20"}
METHODS = ("Local-only", "FedAvg", "FedAvg-FT", "FedPer", "FedRep", "Ditto", "FedPAC")


class Words(NamedTuple):
    method: str
    accuracy: str
    worst: str
    published: str
    ours: str
    difference: str
    seed: str
    origin: str
    taken: str
    spread: str
    within: str
    colon: str
    stop: str
    terms: tuple[tuple[str, str], ...] = ()  # words of origins, in this language


WORDS = {
    "README.md": Words(
        method="method",
        accuracy="accuracy",
        worst="worst 10 % of clients",
        published="published",
        ours="ours",
        difference="difference",
        seed="seed",
        origin="{name}: recipe `{recipe}`, {seed} {seeds}, commit {commit}, {hardware}, precision {precision}",
        taken=", {low} to {high} s a run",
        spread="± is half of the 95 % interval over three seeds; rows without it are of one or two",
        within="Within {near} points of the paper are {here} of these {shown}, and {all} of all {measured} numbers "
        "measured so far.",
        colon=": ",
        stop=". ",
    ),
    "README.zh.md": Words(
        method="方法",
        accuracy="准确率",
        worst="最差 10 % 客户端",
        published="论文",
        ours="本项目",
        difference="差值",
        seed="种子",
        origin="{name}：配方 `{recipe}`，{seed} {seeds}，提交 {commit}，{hardware}，精度 {precision}",
        taken="，每次运行 {low} 至 {high} 秒",
        spread="± 为三个种子的 95 % 置信区间半宽；没有 ± 的行只有一个或两个种子",
        within="上表 {shown} 个数字中有 {here} 个与论文相差不超过 {near} 个百分点；"
        "迄今测得的全部 {measured} 个数字中有 {all} 个。",
        colon="：",
        stop="。",
        terms=((" (", "（"), ("CPU cores)", "个 CPU 核心）"), ("精度 not recorded", "精度未记录")),
    ),
}


def blocks(files: Files, words: Words) -> dict[str, str]:
    return {"demo": demo(files, words), "results": results(files, words)}


def shown(files: Files, name: str) -> list[Cell]:
    """What there is of a recipe that the README shows."""
    made = [cell for cell in cells(files, files.recipe(name)) if cell.comparison.ours]
    if not made:
        raise CoterieError(f"{files.folder} has no results of {name}, which the README shows")
    return made


def demo(files: Files, words: Words) -> str:
    """Accuracy and the worst tenth of the clients."""
    made = shown(files, DEMO)
    rows = [[cell.row.name, ours_text(cell), f"{worst(cell):.2f}"] for cell in made]
    told = origin("Fashion-MNIST", made, words) + words.stop.strip()
    return f"{table([words.method, words.accuracy, words.worst], rows)}\n\n{told}"


def worst(cell: Cell) -> float:
    """Mean of the worst tenth of the clients, at least one, in percent; over seeds."""
    found = [sorted(accuracies(r.content, r.point).values()) for r in cell.readings]
    worst = [a[: max(1, len(a) // 10)] for a in found]
    return sum(100 * sum(a) / len(a) for a in worst) / len(worst)


def results(files: Files, words: Words) -> str:
    """Two datasets side by side."""
    made = {name: [c for c in shown(files, recipe) if c.row.name in METHODS] for name, recipe in SHOWN.items()}
    header, rows = [words.method], {method: [method.removesuffix("-only")] for method in METHODS}
    for name, found in made.items():
        header += [f"{name}{words.colon}{words.published}", words.ours, words.difference]
        by_name = {cell.row.name: cell for cell in found}
        for method, row in rows.items():
            row += texts(by_name[method]) if method in by_name else ["-"] * 3
    told = [origin(name, found, words) + taken(found, words) for name, found in made.items()]
    if any("±" in ours_text(cell) for found in made.values() for cell in found):
        told.append(words.spread)
    told.append(verdicts(files, [cell for found in made.values() for cell in found], words))
    return f"{table(header, list(rows.values()))}\n\n{words.stop.join(told)}"


def texts(cell: Cell) -> list[str]:
    found = cell.comparison
    return [
        published_text(found.published),
        ours_text(cell),
        "-" if found.difference is None else f"{found.difference:+.2f}",
    ]


def origin(name: str, made: list[Cell], words: Words) -> str:
    told = {kind: ", ".join(values) for kind, values in origins(contents(made)).items()}
    text = words.origin.format(
        name=name, recipe=made[0].recipe.id, seed=words.seed, seeds=seeds(contents(made)), **told
    )
    for term, translated in words.terms:
        text = text.replace(term, translated)
    return text


def taken(made: list[Cell], words: Words) -> str:
    seconds = [s for cell in made for r in cell.readings if (s := seconds_alone(r.content)) is not None]
    return words.taken.format(low=f"{min(seconds):.0f}", high=f"{max(seconds):.0f}") if seconds else ""


def verdicts(files: Files, shown: list[Cell], words: Words) -> str:
    """How many are near the paper's number; what several tables have counts once, recipes of our own not at all."""
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
    return markdown(Table("", header, rows)).strip().split("\n", 2)[2]
