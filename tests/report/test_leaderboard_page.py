"""The page of a leaderboard, in a browser: sorted by any column, on a phone, in the dark, without a request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.ledger.tuned import standalone

from coterie.analysis.leaderboard import COMPLETE, NOT_RUN, REFUSED, Board, BoardBenchmark, BoardCell, SeedOutcome
from coterie.core.metric_scale import ACCURACY_SCALE
from coterie.report.leaderboard import page, write_board
from tests.browser import Browser

LONG = "a benchmark <b>with</b> a long name"
MEANS = {"Local": (0.5, 0.9, 0.4), "FedAvg": (0.7, 0.8, 0.6), "FedPAC": (0.9, 0.95, 0.8)}


def board() -> Board:
    names = ("few-classes", "rotation", LONG)
    cells = {
        (name, method): BoardCell(COMPLETE, "", {"lr": 0.0123}, "personal model", seeds(means[at]), ACCURACY_SCALE)
        for method, means in MEANS.items()
        for at, name in enumerate(names)
    }
    cells |= {(name, "Ditto"): BoardCell(NOT_RUN, "", None, "", {}, ACCURACY_SCALE) for name in names}
    cells |= {(name, "FedBN"): BoardCell(REFUSED, "no <norm>", None, "", {}, ACCURACY_SCALE) for name in names}
    benchmarks = [BoardBenchmark(name, f"data of {name}", True) for name in names]
    spaces = dict.fromkeys([*MEANS, "Ditto", "FedBN"], "lr 0.01 to 1")
    return Board(benchmarks, [*spaces], cells, 6, (0, 1), 0.2, spaces, {"commit": ["abc1234"]})


def seeds(mean: float) -> dict[int, SeedOutcome]:
    """MB and seconds rise as accuracy falls."""
    return {s: SeedOutcome((mean - 0.1, mean + 0.1), 0.05, 100 * (1 - mean), 12.0 / mean, False) for s in (0, 1)}


def test_the_diagram_stands_alone() -> None:
    found = board().ranking
    assert found is not None
    root = ElementTree.fromstring(standalone(found))
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"FedPAC 1.00", "FedAvg 2.33", "Local 2.67", "CD = 1.91"} <= set(texts)
    assert len(root.findall(".//*[@class='bar-of']")) == len(found.groups) == 1  # all three: the CD is large


def test_the_page_escapes_and_names_everything() -> None:
    text = page(board())
    assert "<b>with</b>" not in text
    assert "refused: no &lt;norm&gt;" in text
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_board(board(), tmp_path_factory.mktemp("page") / "new" / "board.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def names(browser: Browser, table: int) -> list[str]:
    script = f"[...document.querySelectorAll('table[data-sortable]')[{table}].tBodies[0].rows]"
    return list(browser.run(f"{script}.map((row) => row.cells[0].textContent)"))


def click(browser: Browser, table: int, column: int) -> str:
    """The order that the heading then announces."""
    script = f"document.querySelectorAll('table[data-sortable]')[{table}].tHead.rows[0].cells[{column}]"
    browser.run(f"{script}.querySelector('button').click()")
    return str(browser.run(f"{script}.getAttribute('aria-sort')"))


@pytest.mark.browser
def test_every_column_sorts_both_ways(browser: Browser, written: Path) -> None:
    browser.screen(1200, 900)
    browser.open(written.as_uri())
    assert (browser.problems, browser.requests) == ([], [written.as_uri()])
    assert names(browser, 0) == ["FedPAC", "FedAvg", "Local", "Ditto", "FedBN"]
    assert click(browser, 0, 0) == "ascending"
    assert names(browser, 0) == ["Ditto", "FedAvg", "FedBN", "FedPAC", "Local"]
    assert click(browser, 0, 0) == "descending"
    assert names(browser, 0) == ["Local", "FedPAC", "FedBN", "FedAvg", "Ditto"]
    assert click(browser, 0, 3) == "descending"  # rotation: the best first, gaps last
    assert names(browser, 0)[:3] == ["FedPAC", "Local", "FedAvg"]
    assert click(browser, 0, 3) == "ascending"
    assert names(browser, 0)[:3] == ["FedAvg", "Local", "FedPAC"]
    for column in range(8):  # of the first benchmark, whose order is the same by every number
        first = click(browser, 1, column)
        one = names(browser, 1)
        assert {first, click(browser, 1, column)} == {"ascending", "descending"}
        assert sorted(one) == sorted(names(browser, 1))
        if column in (1, 2, 4, 5):
            assert names(browser, 1)[:3] == one[:3][::-1]
    assert browser.problems == []


@pytest.mark.browser
def test_it_fits_a_phone_in_the_dark(browser: Browser, written: Path) -> None:
    browser.screen(375, 800, scheme="dark")
    browser.open(written.as_uri())
    assert browser.run("document.documentElement.scrollWidth") <= 375
    colors = browser.run(
        "(() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; })()"
    )
    ink, paper = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
    assert ink > 600 > 120 > paper
    sizes = browser.run("[...document.querySelectorAll('thead button')].map((b) => b.getBoundingClientRect().height)")
    assert min(sizes) >= 32  # large enough for a finger
    assert browser.problems == []
