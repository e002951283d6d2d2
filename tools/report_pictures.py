"""Make the pictures of docs/reports.md from runs, with headless Chromium: `python -m tools.report_pictures RUNS`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from coterie.report.page import write_report
from tests.browser import Browser

PICTURES = Path("docs/pictures")


def main(runs: str) -> None:
    """RUNS: the folder of a comparison with FedPAC in it."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        page = write_report([runs], Path(folder) / "report.html").as_uri()
        browser.screen(1280, 1780)
        browser.open(page)
        browser.screenshot(PICTURES / "report-desktop.png")
        browser.screen(375, 812, "dark", scale=2)
        browser.open(page)
        browser.run("document.querySelector('#heads > details').open = true")
        browser.run("document.querySelector('#heads').scrollIntoView({behavior: 'instant'})")
        browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
        browser.screenshot(PICTURES / "report-phone.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
