"""Figures of recipes: lines and shades where they must be by hand, and files that open anywhere."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.papers.figures import figure, publish, write_figures
from coterie.papers.panels import CurvePanel, HeatPanel, seed_curves
from coterie.papers.panels import panels as panels_of
from coterie.papers.recipes import Recipe, find, read_recipe, recipes
from coterie.papers.results import Found
from tests.browser import Browser

SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT, TOP, BOTTOM = 48, 500, 30, 256  # of a panel's data
TEXT = """\
id: mine
paper: "A & <B>"
place: Figure 1
protocol: pac
dataset: fashion-mnist-small
partition: {rule: dominant, num_clients: 4, noniid_s: 20, local_size: 40, test_size: 20}
model: linear
settings: {rounds: 3, join_ratio: 1.0, local_epochs: 1, batch_size: 20, lr: 0.1, momentum: 0.5, weight_decay: 0.0}
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
    text = figure(made, found)
    assert text is not None
    return ElementTree.fromstring(text)


def panels(root: ElementTree.Element) -> list[ElementTree.Element]:
    return root.findall(f"{SVG}svg")


def paths(panel: ElementTree.Element) -> list[str]:
    return [str(p.get("d")) for p in panel.iter(f"{SVG}path") if p.get("class") == "line"]


def words(root: ElementTree.Element) -> str:
    return " ".join(t.text or "" for t in root.iter(f"{SVG}text"))


def test_curves_are_means_over_seeds_at_the_place_of_each_row(tmp_path: Path) -> None:
    """Local is read after training. Fine-tuning is measured at the end only: one point, not the curve of another."""
    made = recipe(tmp_path)
    found: Found = {
        ("Alone", ()): {0: result(0, post=[10, 30, 50]), 1: result(1, post=[30, 50, 70])},
        ("Together", ()): {
            0: result(0, pre=[1, 2, 3], post=[4, 5, 6], finished=[None, None, 50]),
            1: result(1, pre=[1, 2, 3], post=[4, 5, 6], finished=[None, None, 70]),
        },
    }
    root = drawn(made, found)
    (panel,) = panels(root)  # y from 20 to 60, x from 1 to 3
    middle = (LEFT + RIGHT) // 2, (TOP + BOTTOM) // 2
    assert paths(panel) == [
        f"M{LEFT} {BOTTOM}L{middle[0]} {middle[1]}L{RIGHT} {TOP}",
        f"M{RIGHT} {TOP}",
    ]
    told = words(root)
    assert "mine: A & <B>, Figure 1" in told
    assert "seed 0, 1; commit abc1234; hardware abacus (2 CPU cores); precision fp32" in told
    assert {"Alone", "Together"} <= {t.text for t in root.findall(f"{SVG}text")}


def test_all_lines_are_of_the_same_seeds(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    found: Found = {
        ("Alone", ()): {0: result(0, post=[20, 40, 60]), 1: result(1, post=[0, 0, 0])},
        ("Together", ()): {0: result(0, finished=[None, None, 60])},
    }
    root = drawn(made, found)
    middle = (LEFT + RIGHT) // 2, (TOP + BOTTOM) // 2
    assert paths(panels(root)[0])[0] == f"M{LEFT} {BOTTOM}L{middle[0]} {middle[1]}L{RIGHT} {TOP}"
    assert "seed 0; commit" in words(root)


def test_a_curve_has_the_rounds_that_all_seeds_have() -> None:
    assert seed_curves([result(pre=[10, 20, 30]), result(pre=[30, None])], "pre", "clients") == [(1, [10, 30])]
    assert seed_curves([], "pre", "clients") == seed_curves([result(pre=[1])], "global", "clients") == []


def test_over_what_varies(tmp_path: Path) -> None:
    """The best round of each seed, then their mean."""
    made = recipe(
        tmp_path,
        ("figure: rounds", "figure: noniid_s\nvary: {noniid_s: [80, 0, 40]}"),
        ("report: last", "report: best"),
    )
    scores = {80.0: 60, 0.0: 20, 40.0: 60}
    found: Found = {
        (row.name, value): {s: result(s, post=[score - 10 + 20 * s, 1]) for s in (0, 1)} if row.name == "Alone" else {}
        for row in made.rows
        for value in made.values
        for score in [scores[dict(value)["noniid_s"]]]
    }
    root = drawn(made, found)
    (panel,) = panels(root)
    assert paths(panel) == [f"M{LEFT} {BOTTOM}L{(LEFT + RIGHT) // 2} {TOP}L{RIGHT} {TOP}"]
    assert "samples drawn evenly from all classes, %" in words(root)
    assert "Together" not in words(root)  # it was not run


def test_small_settings_are_told_apart(tmp_path: Path) -> None:
    one = result(post=[1, 2], finished=[1, 2])
    for over in ("lr", "rounds"):
        made = recipe(tmp_path, ("figure: rounds", f"figure: {over}\nvary: {{lr: [0.001, 0.002, 0.004]}}"))
        told = words(drawn(made, {(row.name, value): {0: one} for row in made.rows for value in made.values})).split()
        assert {"0.001", "0.002", "0.004"} <= set(told)


def test_a_panel_for_each_choice_and_measure(tmp_path: Path) -> None:
    made = recipe(
        tmp_path,
        ("figure: rounds", "figure: noniid_s\nvary: {noniid_s: [0, 80], local_epochs: [1, 2]}"),
        ("average: clients", "average: clients\nmeasures: {G: pre, P: post}"),
    )
    one = result(pre=[1, 2], post=[3, 4])
    root = drawn(made, {(row.name, value): {0: one} for row in made.rows for value in made.values})
    assert len(panels(root)) == 4
    for name in ("local_epochs 1, G", "local_epochs 1, P", "local_epochs 2, G", "local_epochs 2, P"):
        assert name in words(root)


def test_shades_of_head_weights(tmp_path: Path) -> None:
    made = recipe(
        tmp_path,
        ("figure: rounds", "figure: head_weights\nrecords: {head_weights: [1, 3]}\nvary: {noniid_s: [0, 50]}"),
        ("  - {name: Alone, method: local}\n  - {name: Together, method: fedavg-ft}", "  - {name: X, method: fedpac}"),
    )
    kept = {"head_weights": {"1": [[1.0, 0.0], [0.04, 0.96]], "3": [[0.5, 0.5], [0.5, 0.5]]}}
    found: Found = {("X", v): {s: result(s, records=kept) for s in (0, 1)} for v in made.values}
    root = drawn(made, found)
    first, third, *other = panels(root)
    assert len(other) == 2  # of the other value
    cells = {p.get("class"): p.get("d") for p in first.iter(f"{SVG}path")}
    assert cells["h9"] == "M0 0h1v1h-1zM1 1h1v1h-1z"  # 1 and 0.96, by the root
    assert cells["h1"] == "M0 1h1v1h-1z"  # 0.04: a fifth of the scale
    assert {p.get("d") for p in third.iter(f"{SVG}path") if p.get("d")} == {"M0 0h2v1h-2zM0 1h2v1h-2z"}
    assert "noniid_s 0, round 1" in words(root)
    assert "noniid_s 50, round 3" in words(root)
    assert "seed 0;" in words(root)  # one is shown
    assert "percent, from 0 1 4 9 16 25 36 49 64 81" in words(root)
    assert [t.text for t in first.iter(f"{SVG}text")][:2] == [None, None]  # two of four took part: nobody knows which
    four = {"head_weights": {"1": [[0.25] * 4] * 4}}
    panel, *_ = panels(drawn(made, {("X", v): {0: result(records=four)} for v in made.values}))
    assert [t.text for t in panel.iter(f"{SVG}text")][:4] == ["0", "1", "2", "3"]


def test_nothing_is_drawn_of_nothing_or_of_a_table(tmp_path: Path) -> None:
    empty: Found = {("Alone", ()): {}, ("Together", ()): {}}
    made = recipe(tmp_path)
    assert figure(made, empty) is None
    assert write_figures(made, empty, tmp_path) == []
    table = recipe(tmp_path, ("figure: rounds\n", ""))
    assert figure(table, {("Alone", ()): {0: result(post=[1, 2])}, ("Together", ()): {}}) is None
    assert list(tmp_path.glob("*.svg")) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("figure: rounds", "figure: round")], "did you mean 'rounds'"),
        ([("figure: rounds", "figure: head_weights")], "unknown figure 'head_weights'"),
        ([("figure: rounds", "figure: model\nvary: {model: [linear, mlp]}")], "the values of model are not numbers"),
        (
            [("figure: rounds", "figure: keep_momentum\nvary: {keep_momentum: [true, false]}")],
            "the values of keep_momentum are not numbers",
        ),
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
    root = ElementTree.parse(out / "mine-2-rounds.svg").getroot()
    assert len(paths(panels(root)[0])) == 2
    assert "2 rounds, not the paper's" in words(root)
    main([*asked, "--show"])  # of the whole one nothing is there
    assert "drawn" not in capsys.readouterr().out
    main([*asked, "--rounds", "2", "--show", "--methods", "local", "--format", "csv"])
    printed = capsys.readouterr().out
    assert printed.startswith("method,")
    assert "drawn" not in printed
    assert len(paths(panels(ElementTree.parse(out / "mine-2-rounds.svg").getroot())[0])) == 2  # all that is there


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path)
    found: Found = {("Alone", ()): {0: result(post=[1, 2])}, ("Together", ()): {}}
    with pytest.raises(CoterieError, match="cannot write"):
        write_figures(made, found, tmp_path / "nowhere")
    (tmp_path / "mine.svg").write_text("old", encoding="utf-8")
    write_figures(made, {**found, ("Alone", ()): {0: {**result(post=[1, 2]), "commit": "\ud800"}}}, tmp_path / "..")
    for ending in ("svg", "pdf", "png"):
        (tmp_path / ".." / f"mine.{ending}").unlink()
    monkeypatch.setattr("coterie.papers.figures.figure", lambda recipe, found: "<svg>\ud800")
    with pytest.raises(UnicodeEncodeError):  # half-way through
        write_figures(made, found, tmp_path)
    assert [path.name for path in tmp_path.glob("mine.svg*")] == ["mine.svg"]
    assert (tmp_path / "mine.svg").read_text(encoding="utf-8") == "old"


@pytest.mark.browser
def test_all_words_are_inside_the_picture(tmp_path: Path) -> None:
    long = "a method with " + "quite " * 20 + "a long name"
    made = recipe(tmp_path, ("name: Alone", f"name: {long}"))
    found: Found = {(long, ()): {0: result(post=[1, 2])}, ("Together", ()): {0: result(post=[99, 100])}}
    path = write_figures(made, found, tmp_path)[0]
    with Browser(tmp_path / "profile") as browser:
        browser.open(path.as_uri())
        assert browser.problems == []
        outside = browser.run(
            "(() => { const all = document.documentElement.getBoundingClientRect();"
            "return [...document.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()])"
            ".filter(([, b]) => b.left < all.left || b.right > all.right || b.bottom > all.bottom).map(([t]) => t) })()"
        )
        assert outside == []


def test_papers_get_pdf_and_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path, ("figure: rounds", "figure: rounds\nvary: {noniid_s: [0, 40, 80]}"))
    found: Found = {
        (row.name, value): {s: result(s, post=[10, 30 + s], finished=[None, 50]) for s in (0, 1)}
        for row in made.rows
        for value in made.values
    }
    paths = write_figures(made, found, tmp_path, rounds=2)
    assert [path.name for path in paths] == [f"mine-2-rounds.{ending}" for ending in ("svg", "pdf", "png")]
    assert paths[1].read_bytes().startswith(b"%PDF")
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert b"commit abc1234" in paths[1].read_bytes()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [path.suffix for path in write_figures(made, found, tmp_path / "..")] == [".svg"]
    (tmp_path / ".." / "mine.svg").unlink()


def test_the_legend_is_inside_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One panel, and a long name."""
    long = "a method with quite a long name, which has many words"
    made = recipe(tmp_path, ("name: Alone", f"name: '{long}'"))
    found: Found = {(long, ()): {0: result(post=[1, 2])}, ("Together", ()): {0: result(finished=[99, 100])}}
    seen: list[Any] = []
    monkeypatch.setattr("coterie.analysis.plots.save", lambda figure, *more: seen.append(figure))
    with pytest.raises(CoterieError, match="cannot write"):  # nothing was saved
        publish(made, found, tmp_path / "x")
    (figure,) = seen
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_head_weights_for_papers(tmp_path: Path) -> None:
    made = recipe(
        tmp_path,
        ("figure: rounds", "figure: head_weights\nrecords: {head_weights: [1, 3]}"),
        ("  - {name: Alone, method: local}\n  - {name: Together, method: fedavg-ft}", "  - {name: X, method: fedpac}"),
    )
    kept = {"head_weights": {"1": [[0.25] * 4] * 4, "3": [[0.5, 0.5], [0.5, 0.5]]}}
    assert len(write_figures(made, {("X", ()): {0: result(records=kept)}}, tmp_path)) == 3


def test_head_weights_are_in_the_order_of_groups() -> None:
    """The paper has the members of a group next to each other; here client i is in group i % 5."""
    recipe = find("P1-F3")
    matrix = [[100.0 * i + j for j in range(20)] for i in range(20)]
    found: Found = {("FedPAC", value): {} for value in recipe.values}
    found["FedPAC", recipe.values[0]] = {0: {"records": {"head_weights": {"1": matrix}}}}
    (panel,) = panels_of(recipe, found).shown
    assert isinstance(panel, HeatPanel)
    assert panel.labels[:6] == ["0", "5", "10", "15", "1", "6"]
    assert panel.matrix[1][:5] == [500.0, 505.0, 510.0, 515.0, 501.0]


def test_fedregs_joint_metric_by_hand() -> None:
    recipe = find("P2-F7")
    found: Found = {(row.name, value): {} for row in recipe.rows for value in recipe.values}
    curves = {"global": [0.4, 0.5], "pre": [0.8, 0.7]}  # the best of each counts
    history = {point: {"round": [1, 2], "samples": curve} for point, curve in curves.items()}
    found["FedAvg", (("num_clients", 50),)] = {0: {"history": history}}
    (panel,) = panels_of(recipe, found).shown
    assert isinstance(panel, CurvePanel)
    assert panel.y_name == "log(10 G) + log(10 P)"
    ((x, (y,)),) = panel.curves[0].points
    assert (x, y) == (50.0, pytest.approx(math.log(5) + math.log(8)))
