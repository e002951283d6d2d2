"""Charts against coordinates computed by hand. The area with the data is x 48 to 500, y 256 (low) to 30 (high)."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from coterie.analysis.looks import numbered
from coterie.core.metric_scale import ACCURACY_SCALE
from coterie.report import charts, heat_maps, row_charts
from coterie.report.charts import ChartRow, Series
from coterie.report.markup import Markup, join, tag


def read(drawn: str) -> ET.Element:
    """As XML, with a title and a description first."""
    root = ET.fromstring(drawn)
    assert [child.tag for child in root[:2]] == ["title", "desc"]
    assert root.get("role") == "img"
    return root


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [e for e in root.iter() if name in (e.get("class") or "").split()]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (1, 31, [10, 20, 30]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3, 3, [-2, 0, 2]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_a_range_is_round_and_has_all_values() -> None:
    assert charts.around([36.1, 84.0], most=100) == (20, 100)  # steps of 10 need seven ticks, so steps of 20
    assert charts.around([81.2, 84.9], most=100) == (81, 85)
    assert charts.around([50, 50]) == (49, 51)
    assert charts.around([100, 100], most=100) == (99, 100)
    assert charts.around([0, 0]) == (0, 1)


def test_lines() -> None:
    drawn = charts.lines(
        "t",
        "d",
        [Series("a", [(1, 0), (2, 50), (3, 100)], numbered(0)), Series("b", [(3, 25)], numbered(14))],
        "x",
        "y",
    )
    root = read(drawn)
    first, second = of_class(root, "line")
    assert first.get("d") == "M48 256L274 143L500 30"
    assert second.get("d") == "M500 199.5"  # a quarter of 226 above 256
    groups = [e.get("class") for e in root if e.tag == "g"]
    assert groups == ["s0 d0", "s6 d1"]
    told = json.loads(root.get("data-lines") or "")
    assert told["x"] == [1, 2, 3]
    assert told["series"] == [["a", [0, 50, 100]], ["b", [None, None, 25]]]
    assert told["axes"] == [[1, 3, 48, 500], [0, 100, 256, 30]]


@pytest.mark.parametrize(("x", "marks"), [([1, 2, 3], ["1", "2", "3"]), ([1, 2.5], ["1", "1.2", "1.4", "1.6"])])
def test_marks_are_whole_where_all_values_are(x: list[float], marks: list[str]) -> None:
    drawn = charts.lines("t", "d", [Series("a", [(v, 50) for v in x], numbered(0))], "round", "y")
    told = [e.text for e in read(drawn).iter() if e.tag.endswith("text") and e.get("y") == str(charts.BOTTOM + 19)]
    assert told[: len(marks)] == marks


def test_a_band_is_drawn_around_its_line_and_told() -> None:
    """Half an interval of 10 around 50 and of 100 around 100: the axis ends at 100, and 20 are 45.2 high."""
    drawn = charts.lines("t", "d", [Series("a", [(1, 50), (2, 100)], numbered(0), [10, 100])], "x", "y", most=100)
    root = read(drawn)
    (band,) = of_class(root, "band")
    assert band.get("d") == "M48 120.4L500 30L500 256L48 165.6z"
    told = json.loads(root.get("data-lines") or "")
    assert told["series"] == [["a", [50, 100], [10, 100]]]


def test_every_marker_is_another_shape() -> None:
    assert len({charts.mark(numbered(i), 0, 0) for i in range(8)}) == 8


def test_bars() -> None:
    drawn = charts.bars("t", "d", ChartRow("a", [50, 100], ["first", "second"]), "x", ACCURACY_SCALE, dark=1, line=75)
    root = read(drawn)
    (low,), (high,) = of_class(root, "low"), of_class(root, "bar")
    assert [low.get(k) for k in ("x", "y", "width", "height")] == ["49", "143", "224", "113"]
    assert [high.get(k) for k in ("x", "y", "width", "height")] == ["275", "30", "224", "226"]
    assert (low.get("data-tip"), high.get("data-tip")) == ("first", "second")
    (mean,) = of_class(root, "mean")
    assert mean.get("y1") == "86.5"  # 256 - 0.75 * 226


def test_strips() -> None:
    """From 0 to 100 on x 8 to 510: a percent is 5.02 wide."""
    root = read(row_charts.strips("t", "d", [ChartRow("a", [0, 50, 100], ["0", "50", "100"])], "x", ACCURACY_SCALE))
    assert [e.get("x") for e in of_class(root, "stroke")] == ["6.5", "257.5", "508.5"]  # 1.5 to the left
    (diamond,) = of_class(root, "diamond")
    assert (diamond.get("d") or "").startswith("M259 ")


def test_stacks() -> None:
    root = read(
        row_charts.stacks("t", "d", [ChartRow("a", [1, 3], ["", ""]), ChartRow("b", [2, 0], ["", ""])], ["p", "q"], "s")
    )
    parts = of_class(root, "part")
    assert [(e.get("x"), e.get("width")) for e in parts] == [  # 502 / 4 a second, 1 between parts
        ("8", "124.5"),
        ("133.5", "375.5"),
        ("8", "250"),
        ("259", "0"),
    ]


def test_histogram() -> None:
    root = read(row_charts.histogram("t", [4, 0, 2], 4, after=[2, 0, 2]))
    bars, outline = (of_class(root, name)[0].get("d") for name in ("bar", "after"))
    assert bars == "M0.5 56V2H39.5V56zM80.5 56V29H119.5V56z"  # three of 40; a class nobody has is no bar
    assert outline == "M0 56V29H40V56H80V29H120V56"


def test_cells_of_a_heat_map() -> None:
    """Levels are tenths of 256; neighbours of one level are one piece, nothing is not drawn."""
    paths = heat_maps.heat_paths([[255, 255, 0], [0, 10, 128], [0, 0, 0]])
    expected = {9: "M0 0h2v1h-2z", 0: "M1 1h1v1h-1z", 5: "M2 1h1v1h-1z"}
    assert {level: d for level, d in enumerate(paths) if d} == expected


def test_shades_are_the_root_of_the_share() -> None:
    assert heat_maps.shades(np.array([0, 0.04, 0.25, 1, 1 + 1e-12, -1e-12])).tolist() == [0, 51, 128, 255, 255, 0]


def test_a_heat_map_fills_its_square() -> None:
    root = read(heat_maps.heat_map("t", "d", [[255, 0], [0, 255]], ["3", "7"]))
    (cells,) = of_class(root, "cells")
    assert cells.get("transform") == "translate(52 46) scale(200)"
    (labels,) = of_class(root, "labels")
    assert [e.text for e in labels] == ["3", "7", "3", "7"]
    assert [e.get("x") for e in labels][:2] == ["152", "352"]


def test_long_names_of_clients_are_slanted_and_have_room() -> None:
    root = read(heat_maps.heat_map("t", "d", [[255, 0], [0, 255]], ["Basel", "a hospital with a long name"]))
    (labels,) = of_class(root, "labels")
    texts = [e.text for e in labels]
    assert texts == ["Basel", "a hospital with…"] * 2
    assert [(e.get("transform") or "").startswith("rotate(-45") for e in labels] == [True, True, False, False]
    (ground,) = of_class(root, "ground")
    assert float(ground.get("x") or 0) > 7 * 16


def test_what_is_not_markup_is_escaped() -> None:
    nasty = "<script>\"&'é"
    made = tag("p", nasty, Markup("<br>"), title=nasty, hidden=False, data_x=0.5)
    assert made == (
        "<p title=\"&lt;script&gt;&quot;&amp;&#x27;é\" data-x=\"0.5\">&lt;script&gt;&quot;&amp;&#x27;é<br></p>"
    )  # fmt: skip
    assert (
        ET.fromstring(charts.lines(nasty, nasty, [Series(nasty, [(1, 2)], numbered(0))], nasty, nasty))[0].text == nasty
    )
    assert join(nasty) == "&lt;script&gt;&quot;&amp;&#x27;é"
