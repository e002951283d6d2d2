"""What is made from code has not drifted; both READMEs agree; links lead somewhere. Commands: test_commands_in_docs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coterie.analysis.catalogue import RECORDS
from coterie.analysis.methods_page import markdown
from coterie.core.optimizers import OPTIMIZERS
from coterie.methods import METHODS
from tests import toy
from tests.browser import PROGRAM, Browser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)


def test_the_method_on_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method, use = blocks("add-a-method.md")
    script = tmp_path / "page.py"
    script.write_text(method + "\n" + use, encoding="utf-8")
    made = runpy.run_path(str(script))
    assert capsys.readouterr().out.startswith("[(1, ")
    page = made["FedAvgM"]
    train, model = toy.method("fedavg").train, toy.model(batch_norm=True)
    shipped, _ = toy.looped(toy.method("fedavgm"), model, toy.toy())
    for run in (toy.looped, toy.stacked):
        found, _ = run(page(train=train), model, toy.toy())
        assert toy.distance(shipped, found) < 1e-10


@pytest.mark.long
def test_recorded_behavior_is_the_codes() -> None:
    """If this fails: python -m tools.behavior, then coterie methods --markdown > docs/methods.md"""
    from tools.behavior import records

    assert RECORDS.read_text(encoding="utf-8") == records()


def test_the_table_of_methods_is_the_codes() -> None:
    """If this fails: coterie methods --markdown > docs/methods.md"""
    assert (DOCS / "methods.md").read_text(encoding="utf-8") == markdown()


# The README in two languages.


def readme(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(page: str) -> list[str]:
    """Blocks of code without their comments."""
    found = re.findall(r"^```\w*\n(.*?)^```", page, re.S | re.M)
    return [re.sub(r" *#.*", "", block) for block in found]


def table_rows(page: str) -> list[str]:
    """Of all tables, without their headers."""
    bodies = re.findall(r"^\|[-:|]+\|\n((?:\|.*\n)+)", page, re.M)
    return [row for body in bodies for row in body.splitlines()]


def test_optimizers_on_their_page_are_the_codes() -> None:
    """Default rates, and the methods that refuse optimizers or schedules."""
    page = (DOCS / "optimizers.md").read_text(encoding="utf-8")
    for name, kind in OPTIMIZERS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| `{name}` | {kind.lr:g} | {kind.weight_decay:g}" in row
    for method in METHODS.values():
        assert (f"\n| {method.title} | other optimizers" in page) == bool(method.needs_sgd)


def test_both_readmes_say_the_same() -> None:
    english, chinese = readme("README.md"), readme("README.zh.md")
    assert len(code(english)) == 4
    assert code(english) == code(chinese)
    assert len(table_rows(english)) == 4 + 23
    assert table_rows(english) == table_rows(chinese)
    for found in (r"^#+ ", r"\]\((docs/[^)]*)\)", r"<!-- \w+ -->", r"\d+\.\d+", r"(?<=\*\*).*?\*\*"):
        counted = [len(re.findall(found, page, re.M)) for page in (english, chinese)]
        assert counted[0] == counted[1] > 0, found
    assert sorted(re.findall(r"\d+\.\d+", english)) == sorted(re.findall(r"\d+\.\d+", chinese))
    assert "(README.zh.md)" in english.split("\n\n")[1]
    assert "(README.md)" in chinese.split("\n\n")[1]


# Links and the site.


@pytest.mark.parametrize("page", [*ROOT.glob("README*.md"), *DOCS.glob("*.md")], ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert not target.startswith(("http:", "/")), target
        if target.startswith("https:"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), target
        if page.parent == DOCS:
            assert linked.is_relative_to(DOCS), f"{target} is not part of the site"
        assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_on_the_site() -> None:
    class Loader(yaml.SafeLoader):
        """As safe as its parent; knows the tag of MkDocs for values from the environment."""

    Loader.add_constructor("!ENV", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    assert {page for entry in nav for page in entry.values()} == {path.name for path in DOCS.glob("*.md")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make docs` installs what it needs."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


@pytest.mark.long
def test_the_site_asks_nobody(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert {"index.html", "results.html"} <= {page.name for page in pages}
    asked = r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*|url\(\"?(?:https?:)?//[^)]*"
    for path in (*pages, *site.rglob("*.css")):
        assert re.findall(asked, path.read_text(encoding="utf-8")) == [], path
    assert "<td" in (site / "results.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_api_is_on_the_site(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in ("run", "Result.personal_model", "Method.client_train", "tree.average", "Task.loss"):
        assert re.search(rf'id="coterie\.{re.escape(name)}"', page), name
    assert "Train a federation, and return its history and a model for every client." in page
    assert "&gt;&gt;&gt;" in page  # examples are code


@pytest.mark.browser
def test_the_site_is_searched_from_the_disk(site: Path, tmp_path: Path) -> None:
    if PROGRAM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with Browser(tmp_path / "profile") as browser:
        browser.open((site / "index.html").as_uri())
        browser.run("document.querySelector('[data-md-toggle=search]').click()")
        browser.run(
            "(() => { const field = document.querySelector('[data-md-component=search-query]'); field.focus();"
            " field.value = 'newcomer'; field.dispatchEvent(new Event('keyup')) })()"
        )
        browser.until("document.querySelectorAll('.md-search-result__item').length > 0")
        found = browser.run("[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href).join(' ')")
        assert "glossary.html" in found
        assert [url for url in browser.requests if not url.startswith(("file:", "about:"))] == []
        assert browser.problems == []


@pytest.mark.long
def test_the_situations_are_the_codes() -> None:
    """If this fails: python -m tools.which_method"""
    from tools import which_method

    assert which_method.PAGE.read_text(encoding="utf-8") == which_method.page()
