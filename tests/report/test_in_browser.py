"""Reports in a real browser: what is seen, by pointer and keyboard, on a phone and in the dark."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from csv import reader
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.report.live import LivePage
from coterie.report.page import write_report
from tests import toy
from tests.browser import Browser

pytestmark = pytest.mark.browser
LONG = "<b>a class with a long name</b> & some more of it"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("browser")
    data = replace(toy.toy(), class_names=("a", "b", LONG, "d"))
    for name in ("fedpac", "fedavg", "fedreg"):
        settings = {"rounds": 4, "join_ratio": 0.8, "local_epochs": 1}
        coterie.run(name, data, toy.network(), backend="looped", out=base / f"{name} é", **settings)
    return write_report(sorted(p for p in base.iterdir() if p.is_dir()), base / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six methods with three seeds each, on clients with names."""
    base = tmp_path_factory.mktemp("comparison")
    data = replace(toy.toy(), client_names=("Basel", "Bern", "a hospital with a very long name", "Chur", "Genève"))
    for name, seed in product(("local", "fedavg", "fedper", "fedrep", "ditto", "fedpac"), range(3)):
        settings = {"rounds": 2, "local_epochs": 1, "seed": seed, "backend": toy.IN_TURN}
        coterie.run(name, data, toy.network(seed=seed), out=base / f"{name}-{seed}", **settings)
    return write_report([base], base / "report.html")


@pytest.fixture
def page(browser: Browser, report: Path) -> Browser:
    browser.screen(1200, 900)
    browser.open(report.as_uri())
    return browser


def test_it_opens_without_a_complaint_and_asks_for_nothing(page: Browser, report: Path) -> None:
    assert page.problems == []
    assert page.requests == [report.as_uri()]
    assert page.run("document.images.length > 0 && [...document.images].every((i) => i.naturalWidth > 0)")


def heat(page: Browser) -> Any:
    return page.run(
        "(() => { const f = document.querySelector('figure[data-heat]'); return {"
        "round: f.querySelector('output').textContent, spoken: f.querySelector('input').ariaValueText,"
        "cells: [...f.querySelectorAll('.cells path')].map((p) => p.getAttribute('d')),"
        "labels: f.querySelector('.labels').textContent }; })()"
    )


def test_the_slider_moves_with_the_keyboard(page: Browser) -> None:
    page.run("document.querySelector('figure[data-heat] input').focus()")
    last = heat(page)
    assert last["round"] == "4"
    page.press("ArrowLeft")
    third = heat(page)
    assert (third["round"], third["spoken"]) == ("3", "round 3")
    assert third["cells"] != last["cells"]
    page.press("Home")
    assert heat(page)["round"] == "1"
    page.press("End")
    assert heat(page) == last
    assert page.problems == []


def test_script_and_file_draw_the_same_cells(page: Browser, report: Path) -> None:
    """The file's own drawing of the last round, and the script's."""
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.open(report.as_uri())
    script = (
        "[...document.querySelectorAll('.cells, .cells path, .labels text')].map((e) => [e.textContent,"
        " ...['transform', 'd', 'x', 'y', 'text-anchor'].map((name) => e.getAttribute(name))])"
    )
    written = page.run(script)
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    page.open(report.as_uri())
    assert written == page.run(script)
    assert len(written) > 10


def test_numbers_of_the_heat_map_are_a_table(page: Browser) -> None:
    page.run("document.querySelector('figure[data-heat] summary').click()")
    page.until("document.querySelector('figure[data-heat] td') !== null")
    sums = page.run(
        "[...document.querySelectorAll('figure[data-heat] tbody tr')].map((r) =>"
        " [...r.querySelectorAll('td')].reduce((sum, cell) => sum + +cell.textContent, 0))"
    )
    assert len(sums) == 4  # four of five clients took part
    assert all(abs(total - 100) < 2 for total in sums)


def test_values_are_told_at_the_pointer_and_by_arrow_keys(page: Browser) -> None:
    page.run("document.documentElement.style.scrollBehavior = 'auto'")  # else the page moves on below the pointer
    page.run("document.querySelector('svg[data-lines]').focus()")
    page.press("Home")
    first = page.run("tip.textContent")
    assert first.startswith("round 1\n")
    assert "FedPAC: " in first
    page.press("ArrowRight")
    assert page.run("tip.textContent").startswith("round 2\n")
    page.press("Escape")
    assert page.run("tip.hidden")
    best = "document.querySelector('#summary svg rect[data-tip]')"
    page.run(f"{best}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    x, y = page.run(f"(() => {{ const b = {best}.getBoundingClientRect(); return [b.x + 1.5, b.y + 3] }})()")
    page.point(x, y)
    page.until("!tip.hidden")
    assert "client " in page.run("tip.textContent")
    page.run("document.querySelector('#summary svg').focus()")
    page.press("Home")
    assert "client " in page.run("tip.textContent")


def test_everything_that_acts_can_be_reached_with_the_keyboard(page: Browser) -> None:
    reached = set()
    for _ in range(300):
        page.press("Tab")
        reached.add(page.run("document.activeElement.tagName.toLowerCase()"))
    assert {"a", "svg", "input", "summary", "div"} <= reached


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_nothing_is_wider_than_the_screen(page: Browser, report: Path, width: int) -> None:
    page.screen(width, 800)
    page.open(report.as_uri())
    page.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert page.run("document.documentElement.scrollWidth") == width
    beyond = page.run(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.wide') && !e.closest('svg')"
        " && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    if width == 360:
        sizes = page.run(
            "[...document.querySelectorAll('svg.chart text')].map((e) => e.getBoundingClientRect().height)"
        )
        assert min(sizes) > 9  # letters can be read


@pytest.mark.parametrize(("width", "most"), [(1280, 5000), (375, 8000)])
def test_a_comparison_of_six_methods_with_three_seeds_is_short(
    browser: Browser, comparison: Path, width: int, most: int
) -> None:
    """One line with a band and one row for each of seven results: FedAvg reports FedAvg-FT too."""
    browser.screen(width, 900)
    browser.open(comparison.as_uri())
    assert browser.run("document.documentElement.scrollHeight") < most
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("document.querySelector('#rounds svg').querySelectorAll('.line').length") == 7
    assert browser.run("document.querySelector('#rounds svg').querySelectorAll('.band').length") == 7
    assert browser.run("[...document.querySelectorAll('#summary > .tabled tbody')].map((t) => t.rows.length)") == [7]
    colors = browser.run(
        "[...document.querySelectorAll('svg[data-lines]')].filter((s) => s.checkVisibility()).map((s) =>"
        " [...s.parentElement.querySelectorAll('.legend li')].map((item) => [item.children[1].textContent,"
        " getComputedStyle(item.querySelector('g')).color])).flat()"
    )
    assert len({name for name, _ in colors}) == len({(name, color) for name, color in colors}) == 7
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert browser.run("document.documentElement.scrollWidth") == width
    assert "a hospital with a very long name" in browser.run("document.querySelector('#clients').innerText")
    assert browser.problems == []
    assert browser.requests == [comparison.as_uri()]


def saved(browser: Browser, folder: Path, press: str) -> str:
    """The file that a click downloads."""
    before = set(folder.iterdir())
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.run(f"{press}.click()")
    deadline = time.monotonic() + 20
    while not (found := [p for p in set(folder.iterdir()) - before if p.suffix in (".csv", ".svg")]):
        assert time.monotonic() < deadline, "nothing was downloaded"
        time.sleep(0.05)
    return found[0].read_bytes().decode()


def test_tables_and_charts_are_downloaded(browser: Browser, comparison: Path, tmp_path: Path) -> None:
    """Tables as CSV with intervals in columns of their own; charts as SVG in light colors, from a dark page."""
    browser.screen(1280, 900, "dark")
    browser.open(comparison.as_uri())
    header, *rows = reader(saved(browser, tmp_path, "document.querySelector('#metrics .save')").splitlines())
    assert header[:3] == ["method", "accuracy, %", "accuracy, % ±"]
    assert [row[0] for row in rows] == ["Ditto", "FedAvg", "FedAvg-FT", "FedPAC", "FedPer", "FedRep", "Local"]
    shown = browser.run("[...document.querySelector('#metrics tbody').rows].map((r) => r.cells[1].textContent)")
    assert [f"{row[1]} ± {row[2]}" for row in rows] == shown
    drawn = ET.fromstring(saved(browser, tmp_path, "document.querySelector('#rounds figure > .save')"))
    assert drawn[0].text == "All runs: accuracy over rounds"
    lines = [e for e in drawn.iter() if e.tag.endswith("path") and e.get("fill") == "none"]
    assert {e.get("stroke") for e in lines} >= {"rgb(0, 114, 178)", "rgb(185, 67, 0)"}  # of FedPAC and FedAvg
    assert all("var(" not in value for e in drawn.iter() for value in e.attrib.values())
    assert browser.problems == []
    assert browser.requests[:1] == [comparison.as_uri()]
    assert all(url.startswith(("file:", "blob:")) for url in browser.requests)


def test_the_confusion_matrix_of_a_client_can_be_chosen(browser: Browser, comparison: Path) -> None:
    browser.screen(1280, 900)
    browser.open(comparison.as_uri())
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    script = "[...document.querySelectorAll('.confusion tbody td')].reduce((sum, cell) => sum + +cell.textContent, 0)"
    assert browser.run(script) == 3 * sum(toy.TEST_SIZES)  # three seeds
    choose = (
        "(() => { const s = document.querySelector('.confusion select.%s'); s.selectedIndex = %d;"
        " s.dispatchEvent(new Event('change')); return s.value; })()"
    )
    assert browser.run(choose % ("method", 2)) == "FedPAC"
    assert browser.run(choose % ("client", 1)) == "Basel"
    assert browser.run(script) == 3 * toy.TEST_SIZES[0]
    caption = browser.run("document.querySelector('.confusion caption').textContent")
    assert caption == "FedPAC, client Basel: samples by class and prediction"
    assert browser.problems == []


def test_dark_mode(page: Browser, report: Path) -> None:
    script = "['backgroundColor', 'color'].map((name) => getComputedStyle(document.body)[name])"
    light = page.run(script)
    page.screen(1200, 900, "dark")
    dark = page.run(script)

    def brightness(colour: str) -> int:
        return sum(int(part) for part in colour[4:-1].split(","))

    assert brightness(light[0]) > 700
    assert brightness(dark[0]) < 120
    assert brightness(light[1]) < 120
    assert brightness(dark[1]) > 600
    lines = page.run("getComputedStyle(document.querySelector('.line')).stroke")
    assert brightness(lines) > 300


def test_screenshots_show_something(page: Browser, report: Path, tmp_path: Path) -> None:
    page.screenshot(tmp_path / "light.png")
    page.screen(360, 800, "dark")
    page.screenshot(tmp_path / "dark.png")
    from PIL import Image

    for name, size in (("light", (1200, 900)), ("dark", (360, 800))):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.size == size
            assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50


def test_class_names_are_text(page: Browser) -> None:
    assert page.run(f"document.body.innerText.includes({LONG!r}) || document.body.textContent.includes({LONG!r})")
    assert page.run("document.querySelectorAll('main b').length") == 0


def test_the_live_page_follows_the_run_and_says_when_it_ends(browser: Browser, tmp_path: Path) -> None:
    browser.screen(1200, 900)

    def watch(record: coterie.Round) -> None:
        browser.until(f"document.getElementById('status').textContent.includes('round {record.number} of 3')")

    with LivePage(0, [tmp_path]) as live:
        browser.open(live.address)
        assert browser.run("document.querySelectorAll('svg[data-lines]').length") == 0
        how = {"rounds": 3, "backend": toy.IN_TURN, "out": tmp_path / "run", "progress": False}
        coterie.run(toy.method("fedpac"), toy.toy(), toy.network(), watch=watch, **how)
        browser.until("document.getElementById('status').textContent.includes('finished')")
        assert browser.run("document.querySelectorAll('#rounds tbody tr').length") == 3
        browser.run("document.querySelector('svg[data-lines]').focus()")
        browser.press("Home")
        assert browser.run("tip.textContent").startswith("round 1\n")  # what came later can be read too
        for width in (375, 1200):
            browser.screen(width, 900)
            assert browser.run("document.documentElement.scrollWidth") <= width  # wide tables scroll by themselves
        assert browser.problems == []
        assert all(address.startswith((live.address, "data:")) for address in browser.requests)
    browser.until("document.getElementById('status').textContent.includes('Ended')")
    assert browser.problems == []
