"""Figures of recipes: lines and shades where they must be by hand, and files that open anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.figures import figure, mean_curve, write_figure
from coterie.recipes import Recipe, read_recipe, recipes
from coterie.reproduce import Found
from tests.browser import PROGRAM, Browser

SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT, TOP, BOTTOM = 48, 508, 30, 256  # of a panel's data
TEXT = """\
id: mine
paper: "A & <B>"
place: Figure 1
protocol: pac
dataset: fashion-mnist-small
partition: {rule: dominant, num_clients: 4, noniid_s: 20, local_size: 40, test_size: 20}
model: linear
settings: {rounds: 3, join_ratio: 1.0, epochs: 1, batch: 20, lr: 0.1, momentum: 0.5, weight_decay: 0.0}
figure: rounds
report: last
average: clients
rows:
  - {name: Alone, method: local}
  - {name: Together, method: fedavg-ft}
"""


def recipe(folder: Path, *changes: tuple[str, str]) -> Recipe:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return read_recipe(folder / "mine.yaml")


def result(seed: int = 0, records: dict[str, Any] | None = None, **curves: list[float | None]) -> dict[str, Any]:
    """Accuracies, in percent, of rounds 1, 2, ... at some points of measurement."""
    history = {
        point: {"round": list(range(1, len(own) + 1)), "clients": [v if v is None else v / 100 for v in own]}
        for point, own in curves.items()
    }
    return {
        "seed": seed,
        "history": history,
        "records": records or {},
        "commit": "abc1234",
        "hardware": {"machine": "abacus", "cores": 2},
        "precision": "fp32",
        "libraries": {"torch": "2.13"},
        "date": "2026-11-15",
    }


def drawn(made: Recipe, found: Found) -> ElementTree.Element:
    text = figure(made, made.rows, found)
    assert text is not None
    return ElementTree.fromstring(text)


def panels(root: ElementTree.Element) -> list[ElementTree.Element]:
    return root.findall(f"{SVG}svg")


def paths(panel: ElementTree.Element) -> list[str]:
    return [str(p.get("d")) for p in panel.iter(f"{SVG}path") if p.get("class") == "line"]


def words(root: ElementTree.Element) -> str:
    return " ".join(t.text or "" for t in root.iter(f"{SVG}text"))


def test_curves_are_means_over_seeds_at_the_place_of_each_row(tmp_path: Path) -> None:
    """Local is read after training, and so is fine-tuning, which has no curve of its own."""
    made = recipe(tmp_path)
    found: Found = {
        ("Alone", ()): {0: result(0, post=[10, 30, 50]), 1: result(1, post=[30, 50, 70])},
        ("Together", ()): {0: result(0, pre=[1, 2, 3], post=[20, 20, 60], finished=[99])},
    }
    root = drawn(made, found)
    (panel,) = panels(root)  # y from 20 to 60, x from 1 to 3
    middle = (LEFT + RIGHT) // 2, (TOP + BOTTOM) // 2
    assert paths(panel) == [
        f"M{LEFT} {BOTTOM}L{middle[0]} {middle[1]}L{RIGHT} {TOP}",
        f"M{LEFT} {BOTTOM}L{middle[0]} {BOTTOM}L{RIGHT} {TOP}",
    ]
    told = words(root)
    assert "mine: A & <B>, Figure 1" in told
    assert "seed 0, 1; commit abc1234; hardware abacus (2 CPU cores); precision fp32" in told
    assert {"Alone", "Together"} <= {t.text for t in root.findall(f"{SVG}text")}


def test_a_curve_has_the_rounds_that_all_seeds_have() -> None:
    assert mean_curve([result(pre=[10, 20, 30]), result(pre=[30, None])], "pre", "clients") == [(1, pytest.approx(20))]
    assert mean_curve([], "pre", "clients") == mean_curve([result(pre=[1])], "global", "clients") == []


def test_over_what_varies(tmp_path: Path) -> None:
    made = recipe(tmp_path, ("figure: rounds", "figure: noniid_s\nvary: {noniid_s: [80, 0, 40]}"))
    scores = {80.0: 60, 0.0: 20, 40.0: 60}
    found: Found = {
        (row.name, value): {0: result(post=[1, scores[dict(value)["noniid_s"]]])} if row.name == "Alone" else {}
        for row in made.rows
        for value in made.values
    }
    (panel,) = panels(drawn(made, found))
    assert paths(panel) == [f"M{LEFT} {BOTTOM}L{(LEFT + RIGHT) // 2} {TOP}L{RIGHT} {TOP}"]


def test_a_panel_for_each_choice_and_measure(tmp_path: Path) -> None:
    made = recipe(
        tmp_path,
        ("figure: rounds", "figure: noniid_s\nvary: {noniid_s: [0, 80], epochs: [1, 2]}"),
        ("average: clients", "average: clients\nmeasures: {G: pre, P: post}"),
    )
    one = result(pre=[1, 2], post=[3, 4])
    root = drawn(made, {(row.name, value): {0: one} for row in made.rows for value in made.values})
    assert len(panels(root)) == 4
    for name in ("epochs 1, G", "epochs 1, P", "epochs 2, G", "epochs 2, P"):
        assert name in words(root)


def test_shades_of_head_weights(tmp_path: Path) -> None:
    made = recipe(
        tmp_path,
        ("figure: rounds", "figure: head_weights\nrecords: {head_weights: [1, 3]}\nvary: {noniid_s: [0, 50]}"),
        ("  - {name: Alone, method: local}\n  - {name: Together, method: fedavg-ft}", "  - {name: X, method: fedpac}"),
    )
    kept = {"head_weights": {"1": [[1.0, 0.0], [0.04, 0.96]], "3": [[0.5, 0.5], [0.5, 0.5]]}}
    root = drawn(made, {("X", made.values[0]): {0: result(records=kept)}, ("X", made.values[1]): {}})
    first, third = panels(root)
    cells = {p.get("class"): p.get("d") for p in first.iter(f"{SVG}path")}
    assert cells["h9"] == "M0 0h1v1h-1zM1 1h1v1h-1z"  # 1 and 0.96, by the root
    assert cells["h1"] == "M0 1h1v1h-1z"  # 0.04: a fifth of the scale
    assert {p.get("d") for p in third.iter(f"{SVG}path") if p.get("d")} == {"M0 0h2v1h-2zM0 1h2v1h-2z"}
    assert "noniid s 0, round 1" in words(root)
    assert "noniid s 0, round 3" in words(root)


def test_nothing_is_drawn_of_nothing_or_of_a_table(tmp_path: Path) -> None:
    empty: Found = {("Alone", ()): {}, ("Together", ()): {}}
    made = recipe(tmp_path)
    assert figure(made, made.rows, empty) is None
    assert not write_figure(made, made.rows, empty, tmp_path / "x.svg")
    table = recipe(tmp_path, ("figure: rounds\n", ""))
    assert figure(table, table.rows, {("Alone", ()): {0: result(post=[1, 2])}, ("Together", ()): {}}) is None
    assert list(tmp_path.glob("x*")) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("figure: rounds", "figure: round")], "did you mean 'rounds'"),
        ([("figure: rounds", "figure: head_weights")], "unknown figure 'head_weights'"),
        ([("figure: rounds", "figure: model\nvary: {model: [linear, mlp]}")], "model is not a number"),
    ],
)
def test_a_figure_that_cannot_be(tmp_path: Path, changes: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(CoterieError, match=re.escape(message)):
        recipe(tmp_path, *changes)


def test_the_papers_figures_are_drawn_or_say_how() -> None:
    for known in recipes():
        if "Figure" in known.place:
            assert (known.figure is None) != (known.instead is None), known.id


def test_reproduce_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(tmp_path)
    out = tmp_path / "out"
    asked = ["reproduce", str(tmp_path / "mine.yaml"), "--out", str(out), "--processes", "1", "--seeds", "1"]
    main([*asked, "--rounds", "2"])
    assert "Figure 1 is drawn in" in capsys.readouterr().out
    assert [path.name for path in out.glob("*.svg")] == ["mine-2-rounds.svg"]
    (panel,) = panels(ElementTree.parse(out / "mine-2-rounds.svg").getroot())
    assert len(paths(panel)) == 2
    main([*asked, "--show"])  # of the whole one nothing is there
    assert "drawn" not in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    found: Found = {("Alone", ()): {0: result(post=[1, 2])}, ("Together", ()): {}}
    with pytest.raises(CoterieError, match="cannot be written"):
        write_figure(made, made.rows, found, tmp_path / "nowhere" / "x.svg")


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed, so no figure was opened in a browser")
def test_all_words_are_inside_the_picture(tmp_path: Path) -> None:
    long = "a method with quite a long name"
    made = recipe(tmp_path, ("name: Alone", f"name: {long}"))
    found: Found = {(long, ()): {0: result(post=[1, 2])}, ("Together", ()): {0: result(post=[99, 100])}}
    path = tmp_path / "x.svg"
    assert write_figure(made, made.rows, found, path)
    with Browser(tmp_path / "profile") as browser:
        browser.open(path.as_uri())
        assert browser.problems == []
        outside = browser.run(
            "(() => { const all = document.documentElement.getBoundingClientRect();"
            "return [...document.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()])"
            ".filter(([, b]) => b.left < all.left || b.right > all.right || b.bottom > all.bottom).map(([t]) => t) })()"
        )
        assert outside == []
