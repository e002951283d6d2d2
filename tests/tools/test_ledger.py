"""The ledger: tables by hand, citations, files that are wrong, and pages that no longer say what the files do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.ledger import Files, differences, hypotheses, pages
from tools.ledger.__main__ import main as update_pages
from tools.ledger.findings import Findings
from tools.ledger.overview import overview
from tools.ledger.sections import section
from tools.shares import computed, share

from coterie.cli import main
from coterie.cli.train import DEMO_METHODS, DEMO_SETTINGS
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.data.dirichlet import dirichlet
from coterie.federation import Settings
from coterie.papers.recipes import RECIPES, Recipe, find, read_recipe
from coterie.papers.results import Shelf

ROOT = Path(__file__).parents[2]
CLAIMS = ROOT / "docs" / "claims.md"
RESULTS = ROOT / "benchmarks" / "results"
DEMO = RECIPES / "coterie" / "demo.yaml"
CIFAR, FASHION = "P1-T1-CIFAR10-20", "P1-T1-FMNIST-20"
PAGES = {
    "docs/results.md": "<!-- noise --><!-- end --><!-- readings --><!-- end --><!-- coverage --><!-- end -->\n"
    "# Overview\n<!-- overview --><!-- end -->\n\n# All\n<!-- notes --><!-- end -->\n"
    "<!-- tables --><!-- end -->\n<!-- findings --><!-- end --><!-- hypotheses --><!-- end -->",
    "docs/claims.md": "# Summary\n<!-- summary --><!-- end --><!-- behind --><!-- end --><!-- papers --><!-- end -->\n"
    "<!-- claims --><!-- end -->",
    "README.md": "# A\n<!-- demo --><!-- end -->\n\n# B\n<!-- results --><!-- end -->\n",
    "README.zh.md": "# A\n<!-- demo --><!-- end -->\n\n# B\n<!-- results --><!-- end -->\n",
}


@cache
def recipe_of(name: str | Path) -> Recipe:
    return read_recipe(name) if isinstance(name, Path) else find(name)


def put(folder: Path, recipe: str, row: str, accuracies: Sequence[float], **changes: Any) -> list[Path]:
    """A result for each accuracy, in percent, with seeds 0, 1, ...; all clients of 100 samples are alike."""
    own = folder / f"{recipe}.yaml"
    found = recipe_of(own if own.exists() else recipe)
    (chosen,) = (r for r in found.rows if r.name == row)
    plan, paths = found.plan(chosen, found.values[0]), []
    for seed, accuracy in enumerate(accuracies):
        curve = {"round": [1, 2], "clients": [0.25, accuracy / 100], "samples": [0.25, accuracy / 100]}
        content = {
            "recipe": recipe,
            "method": chosen.training,
            "seed": seed,
            "settings": plan.settings,
            "partition": "0123456789abcdef",
            "hardware": {"machine": "abacus", "cores": 2},
            "precision": "fp32",
            "date": "2026-11-15",
            "commit": "abc1234",
            "libraries": {"torch": "2.13"},
            "seconds": {"total": 12.4 + seed},
            "history": {"pre": curve, "post": curve, "finished": curve},
            "last": {chosen.point: {"client": [0, 1], "correct": [50, 70], "total": [100, 100]}},
        } | changes
        paths.append(Shelf(folder).add(recipe, chosen.training, (), plan, seed, content))
    return paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pages with marks, and a few results; this folder is the current one."""
    for name, page in PAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(page, encoding="utf-8")
    made = tmp_path / "results"
    made.mkdir()
    put(made, "demo", "Local", [60.0])
    put(made, FASHION, "FedPAC", [91.0])
    put(made, CIFAR, "FedPAC", [80.0, 81.0, 82.0])
    put(made, CIFAR, "FedAvg", [68.55])  # published 70.05
    put(made, CIFAR, "FedPer", [69.88])  # published 68.37
    monkeypatch.chdir(tmp_path)
    return made


def ledger(*flags: str) -> int:
    return update_pages(["--results", "results", *flags])


def lines(text: str) -> dict[str, dict[str, str]]:
    """The first table of a text: row -> column -> cell."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    )
    names = [f"{name} {i}" if name in header[:i] else name for i, name in enumerate(header)]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


# Tables.


def test_numbers_and_verdicts_by_hand(folder: Path) -> None:
    text = section(Files(folder), find(CIFAR), {})
    rows = lines(text)
    assert list(rows) == ["FedAvg", "FedAvg-FT", "FedPer", "FedPAC"]  # in the recipe's order; FT is FedAvg's training
    fedpac = {"published": "81.13", "difference": "-0.13", "verdict": "undecided", "seeds": "3", "read at": "pre"}
    assert fedpac.items() <= rows["FedPAC"].items()
    assert rows["FedPAC"]["ours"] == "81.00 ± 2.48"  # 4.3027 (t, 2 degrees of freedom) · 1 / √3
    assert rows["FedPAC"]["seconds"] == "13"
    one = {"ours": "68.55 ± 4.30", "difference": "-1.50", "verdict": "undecided", "seeds": "1", "reading": "code"}
    assert one.items() <= rows["FedAvg"].items()  # FedPAC's are the only runs with several seeds: the noise is 1 point
    assert {"difference": "-8.01", "verdict": "off"}.items() <= rows["FedAvg-FT"].items()
    assert rows["FedPer"]["reading"] == "fitted (1 of 2)"


def test_the_overview_by_hand(folder: Path) -> None:
    assert overview(Files(folder)).splitlines()[2:] == [
        "| **FedPAC, ICLR 2023** | 5 | 0 | 1 | 4 | |",
        f"| [{CIFAR}](#p1-t1-cifar10-20-fedpac-iclr-2023-tables-1-and-4) | 4 | 0 | 1 | 3 | "
        "FedAvg-FT -8.01 |",  # FedAvg's training was given the same accuracy at every point
        f"| [{FASHION}](#p1-t1-fmnist-20-fedpac-iclr-2023-tables-1-and-4) | 1 | 0 | 0 | 1 |  |",
    ]


def test_a_table_says_where_it_comes_from(folder: Path) -> None:
    text = section(Files(folder), find(CIFAR), {"cifar10": "Mind the frogs.", "emnist": "No."})
    assert text.startswith(f"## {CIFAR}: FedPAC, ICLR 2023, Tables 1 and 4\n")
    for said in (f"Recipe `{CIFAR}`", "20 clients", "200 rounds", "seed 0, 1, 2;", "commit abc1234", "precision fp32"):
        assert said in text
    assert "hardware abacus (2 CPU cores)" in text
    assert "Not run: Local-only, LG-FedAvg, FedRep" in text
    assert text.endswith("Mind the frogs.")


def test_what_differs_between_rows_is_a_column(folder: Path) -> None:
    put(folder, CIFAR, "FedAvg", [68.55], commit="def5678", precision="tf32")
    text = section(Files(folder), find(CIFAR), {})
    rows = lines(text)
    assert (rows["FedAvg"]["commit"], rows["FedPAC"]["commit"]) == ("def5678", "abc1234")
    assert (rows["FedAvg"]["precision"], rows["FedPAC"]["precision"]) == ("tf32", "fp32")
    assert "commit abc1234" not in text


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("README.md", "Five papers print 743 different numbers; 7 of them were run"),
        ("README.zh.md", "743 个不同的数字，已运行 7 个"),
    ],
)
def test_the_readme_by_hand(folder: Path, name: str, within: str) -> None:
    assert ledger() == 0
    demo, results = Path(name).read_text(encoding="utf-8").split("# B")
    assert list(lines(demo)["Local"].values()) == ["Local", "60.00", "50.00"]  # the worst tenth of two clients is one
    pac, average = lines(f"# {results}")["FedPAC"], lines(f"# {results}")["FedAvg"]
    assert [*pac.values()][1:4] == ["91.83", "91.00", "-0.83"]
    assert [*pac.values()][5:8] == ["81.13", "81.00 ± 2.48", "-0.13"]
    assert [*average.values()][1:8] == ["-"] * 4 + ["70.05", "68.55 ± 4.30", "-1.50"]
    assert within in results  # FedPAC's numbers are in four tables, FedAvg-FT's in three, FedAvg's in two
    assert f"{CIFAR} FedAvg-FT -8.0, P0-T1-CIFAR10-20 Replicate +4.5" in results  # the worst rows, each once


# Pages.


def test_a_changed_number_is_found_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger("--check") == 1
    assert ledger() == 0
    assert ledger("--check") == 0
    path = next(folder.glob(f"{CIFAR}/fedper-*.json"))
    path.write_text(path.read_text(encoding="utf-8").replace("0.6988", "0.6989"), encoding="utf-8")
    before = Path("docs/results.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert ledger("--check") == 1
    told = capsys.readouterr().out
    assert f"results.md does not match results: {CIFAR}: FedPAC, ICLR 2023, Tables 1 and 4\n" in told
    assert FASHION not in told
    assert "README.md" in told
    assert Path("docs/results.md").read_text(encoding="utf-8") == before  # a check writes nothing
    assert ledger() == 0
    assert "| FedPer | 68.37 | 69.89 ± 4.30 |" in Path("docs/results.md").read_text(encoding="utf-8")


def test_a_page_that_was_changed_by_hand_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger() == 0
    page = Path("README.md")
    page.write_text(page.read_text(encoding="utf-8").replace("81.00", "81.20"), encoding="utf-8")
    capsys.readouterr()
    assert ledger("--check") == 1
    assert capsys.readouterr().out == "README.md does not match results: B\n"


def test_marks_and_pages_that_are_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("README.md").write_text("nothing", encoding="utf-8")
    assert ledger() == 2
    assert "README.md: expected one mark <!-- demo --> ... <!-- end -->, found 0" in capsys.readouterr().err
    assert Path("docs/results.md").read_text(encoding="utf-8") == PAGES["docs/results.md"]  # all pages or none
    Path("README.md").unlink()
    assert ledger() == 2
    assert "README.md: No such file" in capsys.readouterr().err
    assert update_pages(["--results", "nowhere"]) == 2
    assert "folder nowhere not found" in capsys.readouterr().err


def test_sections_that_come_and_go_are_named() -> None:
    assert differences("x\n## A\n1\n## B\n2\n", "x\n## A\n1\n## C\n2\n") == ["C", "B"]
    assert differences("x\n## A\n1\n", "y\n## A\n1\n") == ["the beginning"]


def test_from_a_training_to_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = """\
id: mine
paper: Ours
place: Table 1
protocol: pac
dataset: fashion-mnist-small
partition: {rule: dominant, num_clients: 4, noniid_s: 20, local_size: 40, test_size: 20}
model: linear
settings: {rounds: 1, join_ratio: 1.0, local_epochs: 1, batch_size: 20, lr: 0.1, momentum: 0.5, weight_decay: 0.0}
report: last
average: clients
rows:
  - {name: Alone, method: local, reading: default, published: 50.0}
"""
    (folder / "mine.yaml").write_text(own, encoding="utf-8")
    main(["reproduce", "results/mine.yaml", "--out", "results", "--seeds", "3", "--processes", "1", "--format", "csv"])
    table = dict(zip(*(line.split(",") for line in capsys.readouterr().out.splitlines()[:2]), strict=True))
    assert ledger() == 0
    shown = Path("docs/results.md").read_text(encoding="utf-8").split("## mine: Ours, Table 1")[1].split("\n## ")[0]
    assert lines(shown)["Alone"]["ours"] == f"{table['ours']} ± {table['±']}"
    assert table["verdict"] == "undecided"  # Coterie has no noise of this dataset, and so no band

    (folder / "again.yaml").write_text(own.replace("mine", "again"), encoding="utf-8")
    (folder / "never.yaml").write_text(
        own.replace("mine", "never").replace("local, reading", "fedavg, reading"), encoding="utf-8"
    )
    assert ledger() == 0
    page = Path("docs/results.md").read_text(encoding="utf-8")
    again = page.split("## again: Ours, Table 1")[1].split("\n## ")[0]
    assert lines(again)["Alone"] == lines(shown)["Alone"]
    assert "## never" not in page


def test_figures_whose_trainings_are_all_there_are_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FedPAC's figure 4 shows trainings of its Table 1."""
    rows = [row.name for row in find("P1-F4-FMNIST").rows]
    for row in rows[:-1]:
        put(folder, FASHION, row, [70.0])
    assert ledger() == 0
    picture = Path("docs/pictures/P1-F4-FMNIST.svg")
    assert picture.read_text(encoding="utf-8").count('class="line"') == 2 * len(rows)  # one in the key for each
    assert "(pictures/P1-F4-FMNIST.svg)" in Path("docs/results.md").read_text(encoding="utf-8")
    assert not Path("docs/pictures/P1-F4-CIFAR10.svg").exists()  # some of its trainings are missing
    assert ledger("--check") == 0
    picture.write_text("<svg/>", encoding="utf-8")
    capsys.readouterr()
    assert ledger("--check") == 1
    assert str(picture) in capsys.readouterr().out


def test_results_that_no_table_shows_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = put(folder, CIFAR, "Ditto", [70.0], settings={"dataset": "cifar10"})
    assert Files(folder).in_no_table() == [path]
    ledger()
    told = capsys.readouterr().err
    assert "1 results appear in no table" in told
    assert str(path.relative_to(folder.parent)) in told


# Findings.


def resolved(folder: Path, text: str) -> str:
    (folder / "findings.yaml").write_text(json.dumps({"findings": {"X": text}}), encoding="utf-8")
    return Findings(Files(folder)).texts["X"]


def test_citations_are_the_numbers(folder: Path) -> None:
    said = resolved(folder, f"{{{CIFAR}.fedpac.mean}} {{{CIFAR}.FedPAC.published}} {{{CIFAR}.fedavg.difference:+.1f}}")
    assert said == "81.00 81.13 -1.5"
    assert resolved(folder, f"{{{CIFAR}.fedper.gap}} {{{CIFAR}.fedpac.seeds}} of CIFAR-10") == "1.51 3 of CIFAR-10"
    assert resolved(folder, f"{{{CIFAR}.fedpac.half}} {{{CIFAR}.fedpac.std}}") == "2.48 1.00"
    assert resolved(folder, f"{{{CIFAR}.fedpac.post:.1f}} {{data.emnist.test:,}}") == "81.0 116,323"


def test_citations_at_one_of_several_values(folder: Path) -> None:
    varied = DEMO.read_text(encoding="utf-8").replace("id: demo", "id: varied")
    varied = varied.replace("report: last", "vary: {local_epochs: [1, 2]}\nreport: last")
    (folder / "varied.yaml").write_text(varied, encoding="utf-8")
    put(folder, "varied", "FedPAC", [55.0])
    assert resolved(folder, "{varied.fedpac[local_epochs=1].mean}") == "55.00"
    with pytest.raises(CoterieError, match=r"\{varied\.fedpac\[local_epochs=2\]\.mean\}: no such number"):
        resolved(folder, "{varied.fedpac[local_epochs=2].mean}")


def test_citations_of_another_measure_and_of_the_last_rounds(folder: Path) -> None:
    """FedReG's G and P are means over samples, of the best round."""
    small, large = [0.5, *[0.25] * 9, 0.75], [0.9, *[0.5] * 10]
    history = {
        "global": {"round": [*range(11)], "clients": large, "samples": small},
        "pre": {"round": [*range(11)], "clients": small, "samples": large},
    }
    put(folder, "P2-T2-FMNIST", "FedReG", [0.0], history=history)
    cited = "{P2-T2-FMNIST.fedreg.mean} {P2-T2-FMNIST.fedreg[G].late} {P2-T2-FMNIST.fedreg[P].mean:.1f}"
    assert resolved(folder, cited) == "75.00 30.00 90.0"
    assert resolved(folder, "{P2-T2-FMNIST.fedreg[P].late} {P2-T2-FMNIST.fedreg[P].published}") == "50.00 97.52"
    with pytest.raises(CoterieError, match=r"value of P2-T2-FMNIST 'Q'"):
        resolved(folder, "{P2-T2-FMNIST.fedreg[Q].mean}")
    table = section(Files(folder), find("P2-T2-FMNIST"), {})
    shown = [[c.strip() for c in line.split("|")[1:5]] for line in table.splitlines() if line.startswith("| FedReG")]
    assert shown == [["FedReG", "G", "88.35", "75.00"], ["FedReG", "P", "97.52", "90.00"]]


def test_a_note_stands_beside_the_tables_of_its_dataset(folder: Path) -> None:
    notes = {"notes": {"cifar10": "Mind the frogs.", "emnist": "{data.emnist.test:,} images."}}
    (folder / "findings.yaml").write_text(json.dumps(notes), encoding="utf-8")
    assert ledger() == 0
    above, tables = Path("docs/results.md").read_text(encoding="utf-8").split("<!-- tables -->")
    assert "- 116,323 images." in above
    assert "frogs" not in above
    assert tables.count("Mind the frogs.") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{P1-T1-CIFAR10-21.fedpac.mean}", "unknown recipe 'P1-T1-CIFAR10-21': did you mean P1-T1-CIFAR10-20?"),
        ("{P1-T1-CIFAR10-20.fedpca.mean}", "did you mean 'fedpac'?"),
        ("{P1-T1-CIFAR10-20.fedpac.median}", "no such number"),
        ("{P1-T1-CIFAR10-20.ditto.mean}", "no such number; available: published"),  # not run
        ("{P1-T1-CIFAR10-20.fedpac[local_epochs=3].mean}", "unknown value of"),
        ("{P1-T1-CIFAR10-20.fedpac.mean:q}", "Unknown format code"),
        ("{fedpac}", "is not of the form"),
        ("{data.mnist.all}", "unknown split"),
        ("SCAFFOLD is 4.6 short", "'4.6' in 'SCAFFOLD is 4.6 short...' must be cited from a result"),
        ("57 % of the data", "'57 %' in '57 % of the data...' must be cited from a result"),
    ],
)
def test_citations_that_lead_nowhere(folder: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CoterieError, match=re.escape(told)) as error:
        resolved(folder, text)
    assert "findings.yaml" in str(error.value)
    assert ledger("--check") == 2


def test_a_file_of_findings_that_is_none(folder: Path) -> None:
    for text in ("a: [", "findings: 3", "findings: {X: 4}", "fnidings: {}"):
        (folder / "findings.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(CoterieError, match=r"findings\.yaml: "):
            Findings(Files(folder))


# Hypotheses.

TELLS = {"miss": "X {P1-T1-CIFAR10-20.fedper.difference:+.1f}", "why": "Y", "rows": {CIFAR: ["FedPer", "Ditto"]}}


def hypothesized(folder: Path, *entries: dict[str, Any]) -> list[list[str]]:
    (folder / "hypotheses.yaml").write_text(json.dumps({"hypotheses": entries}), encoding="utf-8")
    files = Files(folder)
    rows = hypotheses.table(files, Findings(files)).splitlines()[2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def test_hypotheses_say_what_was_run_and_what_became_of_them(folder: Path) -> None:
    found = hypothesized(
        folder,
        TELLS | {"verdict": "open", "seen": "Z"},
        TELLS | {"rows": {CIFAR: ["Ditto"]}},
        {"miss": "X", "why": "Y", "needs": "a new option"},
    )
    assert found[0] == ["X +1.5", "Y", f"`{CIFAR}`", "1 of 2", "1", "open", "Z"]
    assert found[1][3:] == ["0 of 1", "-", "not run", ""]
    assert found[2][2:] == ["-", "-", "-", "not run", "cannot be run yet: needs a new option"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "has 1 runs and verdict ''"),
        ({"verdict": "kept", "rows": {CIFAR: ["Ditto"]}}, "has 0 runs and verdict 'kept'"),
        ({"verdict": "true"}, "verdict"),
        ({"verdict": "open", "rows": {CIFAR: ["Dito"]}}, "did you mean"),
        ({"verdict": "open", "needs": "something"}, "either rows, or what it needs"),
        ({"verdict": "open", "seen": "3.2 points"}, "'3.2' in"),
        ({"verdict": "open", "guess": "W"}, "guess"),
    ],
)
def test_hypotheses_that_do_not_match_their_runs(folder: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(CoterieError, match=re.escape(told)) as error:
        hypothesized(folder, TELLS | change)
    assert "hypothes" in str(error.value)


def test_the_rows_of_all_hypotheses_are_in_recipes_that_are_read() -> None:
    files = Files(RESULTS)
    named = {name for own in hypotheses.hypotheses(files, Findings(files)) for name in own.rows}
    assert {name for name in files.own if name.startswith("hypothesis-")} <= named


# Files.


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in names[:-1]:
            content = content[name]
        del content[names[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("commit"), "commit is missing"),
        (without("seed"), "seed is missing"),
        (without("hardware", "machine"), "hardware: machine is missing"),
        (without("history", "pre", "clients"), "history: pre: clients is missing"),
        (lambda c: c.update(recipe="P1-T1-CIFAR10-2"), "unknown recipe"),
        (lambda c: c.update(seed="0"), "seed is '0': it must be a whole number"),
        (lambda c: c.update(seconds={"total": "long"}), "seconds: total is 'long'"),
        (lambda c: c.update(history=[]), "history is []"),
        (lambda c: c["history"]["pre"]["clients"].pop(), "history: pre: 2 rounds, but 1 accuracies"),
        (
            lambda c: c["history"]["pre"]["clients"].append(80.0) or c["history"]["pre"]["round"].append(3),
            "80.0 is not",
        ),
        (lambda c: c["history"]["pre"].update(clients=[0.1, float("nan")]), "nan: it must be a finite number"),
        (lambda c: c["last"]["pre"].update(correct=[101, 1]), "none above its total"),
        (lambda c: c["last"]["pre"].update(correct=[1]), "one correct count per client"),
    ],
)
def test_a_malformed_file_is_named(
    folder: Path, change: Callable[[dict[str, Any]], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(folder.glob(f"{CIFAR}/fedpac-seed1-*.json"))
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    assert ledger() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ledger: {path.relative_to(folder.parent)}: ")
    assert told in error
    assert Path("README.md").read_text(encoding="utf-8") == PAGES["README.md"]


def test_junk_anywhere_gives_an_error_or_a_table(folder: Path) -> None:
    path = next(folder.glob(f"{CIFAR}/fedpac-seed1-*.json"))
    whole = json.loads(path.read_text(encoding="utf-8"))
    places = [(name,) for name in whole] + [(n, inner) for n, v in whole.items() if isinstance(v, dict) for inner in v]
    places += [("history", "pre", name) for name in whole["history"]["pre"]] + [("last", "pre", "total")]
    told = 0
    for *above, name in places:
        for junk in (None, [], {}, "x", -1, 1e999, [None], {"a": [1]}):
            content = json.loads(json.dumps(whole))
            inner = content
            for key in above:
                inner = inner[key]
            inner[name] = junk
            path.write_text(json.dumps(content), encoding="utf-8")
            try:
                section(Files(folder), recipe_of(CIFAR), {})
            except CoterieError as error:
                assert str(error).startswith(str(path)), (name, junk)  # noqa: PT017 - many cases, one test
                told += 1
    assert told > len(places)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '"recipe"', "\udcff"])
def test_files_that_hold_no_result(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / CIFAR / "x-seed0-0.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert ledger() == 2
    assert capsys.readouterr().err.startswith(f"ledger: {path.relative_to(folder.parent)}: ")


def test_runs_from_before_there_were_recipes(folder: Path) -> None:
    run = {
        "method": "ditto",
        "seed": 0,
        "commit": "old",
        "seconds": {"total": 9.0},
        "last": {"pre": 0.5, "post": 0.9001},
    }
    old = {
        "date": "d",
        "machine": "m",
        "torch": "t",
        "python": "p",
        "partition": "q",
        "rows": {FASHION: {"Ditto": ["ditto", "post"]}},
    }
    old["cells"] = [run | {"curves": {"post": [10.0, 90.01]}}]
    (folder / "old.json").write_text(json.dumps(old), encoding="utf-8")
    rows = lines(section(Files(folder), find(FASHION), {}))
    assert {"ours": "90.01", "difference": "-0.42", "before": "50.00", "commit": "old"}.items() <= rows["Ditto"].items()
    assert rows["Ditto"]["precision"] == "not recorded"
    assert resolved(folder, "{old.ditto.pre}") == "50.00"
    with pytest.raises(CoterieError, match="unknown point of ditto 'global'"):
        resolved(folder, "{old.ditto.global}")
    put(folder, FASHION, "Ditto", [90.5])  # by the recipe: counts from now on
    assert lines(section(Files(folder), find(FASHION), {}))["Ditto"]["ours"] == "90.50"
    for wrong in (
        {"cells": [{}]},
        {**old, "rows": {"P9": {}}},
        {**old, "rows": {FASHION: {"Ditto": ["ditto", "global"]}}},
        {**old, "cells": 3},
    ):
        (folder / "old.json").write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(CoterieError, match=r"old\.json: "):
            Files(folder)


# What is here.


def test_the_pages_are_those_of_the_files() -> None:
    """If this fails: python -m tools.ledger"""
    found = {p.name: differences(*versions) for p, versions in pages(Files(RESULTS), ROOT).items()}
    assert {"results.md", "claims.md", "README.md", "README.zh.md", "noise.yaml", "P1-F4-CIFAR10.svg"} <= found.keys()
    assert not any(found.values()), found


def test_a_number_that_is_typed_outside_of_the_marks_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, text = Path("docs/claims.md"), PAGES["docs/claims.md"]
    for number in ("81.3", "65 %", "1,234", "61.2 %"):
        page.write_text(f"{text}\nIt has {number} in all.", encoding="utf-8")
        assert ledger("--check") == 2
        assert f"claims.md: {number} outside of the marks" in capsys.readouterr().err
    page.write_text(f"{text}\nA 95 % interval, [notes](a-1.5.md), `--lr 0.1`, 3 seeds.", encoding="utf-8")
    assert ledger() == 0


def test_shares_of_classes_are_those_of_their_file(folder: Path) -> None:
    stored = json.loads((RESULTS / "shares.json").read_text(encoding="utf-8"))
    assert {"command": stored["command"], **computed()} == stored
    assert share(dirichlet, 60, num_clients=5, alpha=1e6) == pytest.approx(
        10, abs=0.1
    )  # every client has as much of every class
    draw, counts = np.random.RandomState(42), np.zeros((10, 0), int)  # as PFLlib's code does it: (client, class)
    for _ in range(10):
        draw.shuffle(np.arange(7000))
        p = draw.dirichlet(np.full(10, 0.5)) * (counts.sum(1) < 7000)
        edges = (np.cumsum(p / p.sum()) * 7000).astype(int)[:-1]
        counts = np.column_stack([counts, np.diff([0, *edges, 7000])])
    theirs = 100 * (counts**2 / counts.sum(1, keepdims=True)).sum() / counts.sum()
    assert stored["pfakd"]["authors"] == pytest.approx(theirs, abs=0.01)
    (folder / "shares.json").write_text(json.dumps(stored), encoding="utf-8")
    assert resolved(folder, "{shares.pfakd.authors}") == f"{theirs:.2f}"
    with pytest.raises(CoterieError, match=r"shares\.json has no pfakd\.odd"):
        resolved(folder, "{shares.pfakd.odd}")


def test_all_early_runs_are_in_a_table() -> None:
    """As they were measured: the ends of the file, to the last digit."""
    files = Files(RESULTS)
    content = json.loads((RESULTS / "fashion-mnist-20.json").read_text(encoding="utf-8"))
    assert {c["method"] for c in content["cells"]} == {m for rows in content["rows"].values() for m, _ in rows.values()}
    shown = {}
    for recipe, rows in content["rows"].items():
        named = {row.name: row for row in files.recipe(recipe).rows}
        shown |= {(m, point): named[row].published[()]["accuracy"].mean for row, (m, point) in rows.items()}
    assert shown["hypcluster-5", "finished"] == 89.08
    for cell in content["cells"]:
        for point, end in cell["last"].items():
            assert files.early["fashion-mnist-20"].trainings[cell["method"]]["history"][point]["clients"][-1] == end


def test_the_demo_is_the_recipe_of_its_table() -> None:
    recipe = read_recipe(DEMO)
    assert list(dict.fromkeys(row.training for row in recipe.rows)) == DEMO_METHODS
    plan = recipe.plan(recipe.rows[-1], ())
    assert (plan.dataset, plan.federation.rounds) == (DEMO_SETTINGS["dataset"], DEMO_SETTINGS["rounds"])
    assert plan.partition == {k: DEMO_SETTINGS[k] for k in ("num_clients", "noniid_s", "local_size", "test_size")}
    assert plan.method.train == LocalTraining(
        lr=0.01, momentum=0.5, weight_decay=0.0005, batch_size=DEMO_SETTINGS["batch_size"]
    )
    assert plan.federation == Settings(rounds=DEMO_SETTINGS["rounds"], join_ratio=plan.federation.join_ratio)
