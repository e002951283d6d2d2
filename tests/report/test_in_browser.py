"""Reports in a real browser: what is seen, by pointer and keyboard, on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    page.run("document.querySelector('svg[data-lines]').focus()")
    page.press("Home")
    first = page.run("tip.textContent")
    assert first.startswith("round 1\n")
    assert "FedPAC: " in first
    page.press("ArrowRight")
    assert page.run("tip.textContent").startswith("round 2\n")
    page.press("Escape")
    assert page.run("tip.hidden")
    best = "document.querySelector('#clients svg').querySelector('rect:last-of-type')"
    page.run(f"{best}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    x, y = page.run(f"(() => {{ const b = {best}.getBoundingClientRect(); return [b.x + 3, b.y + 3] }})()")
    page.point(x, y)
    page.until("!tip.hidden")
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
