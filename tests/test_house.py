"""The arrangement of src/coterie: what is documented, and what no linter checks."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from coterie.core.version import VERSION

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "coterie"
MODULES = sorted(SRC.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_EVERY_METHOD = {"Server", "State", "Down", "Up"}
MOST_LINES = 300
VAGUE = {"utils", "util", "common", "helpers", "misc", "around", "hope", "parts", "terms", "member", "own", "given"}
WORDS = r"\b(?:told|nobody|anew|beside|meanwhile|thereof|mended|lest|whosoever|hoped|in vain|is no more)\b"  # literary


def folders() -> set[str]:
    return {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}


def documented() -> dict[str, str]:
    """Folders and their descriptions, from the table in docs/how-it-works.md."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    _, table = page.split("| folder | what it is |\n|---|---|\n")
    return dict(re.findall(r"^\| `(\w+)/` \| (.*) \|$", table.split("\n\n")[0], re.M))


def test_every_folder_is_documented() -> None:
    assert folders() == set(documented())


def test_every_folder_has_a_layer() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    assert folders() == {name.strip().removeprefix("coterie.") for layer in layers for name in layer.split("|")}


def test_no_loose_modules() -> None:
    assert {path.name for path in SRC.iterdir() if path.is_file()} == {"__init__.py", "__main__.py", "py.typed"}


@pytest.mark.parametrize("folder", sorted(folders()))
def test_the_docs_quote_the_docstring(folder: str) -> None:
    docstring = ast.get_docstring(ast.parse((SRC / folder / "__init__.py").read_text(encoding="utf-8")))
    assert docstring, f"{folder}/__init__.py has no docstring"
    assert "\n" not in docstring
    assert documented()[folder] == docstring


def test_a_class_name_means_one_thing() -> None:
    """Except those that every method has."""
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and not (node.name in OF_EVERY_METHOD and path.is_relative_to(SRC / "methods"))
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_are_short() -> None:
    long = [path for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES]
    assert [str(path.relative_to(SRC)) for path in long] == []


def test_names_of_modules_say_what_they_hold() -> None:
    assert [str(path.relative_to(SRC)) for path in MODULES if path.stem in VAGUE or path.parent.name in VAGUE] == []


def test_every_module_says_what_it_is_for() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
    assert [str(path.relative_to(SRC)) for path, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_only_methods_import_a_method_by_its_module() -> None:
    """A method is looked up by its name: what is particular to it lives in its file or folder."""
    importing = [
        str(path.relative_to(SRC))
        for path in MODULES
        if not path.is_relative_to(SRC / "methods")
        and re.search(r"coterie\.methods\.\w", path.read_text(encoding="utf-8"))
    ]
    assert importing == []


def test_run_folders_are_read_in_one_place() -> None:
    """Through coterie.runs; PFLlib's folders have a config.json, too."""
    reading = re.compile(
        r"""(?:/ |read\()["'](?:config\.json|result\.json|metrics\.csv|clients\.csv|evaluation\.csv)["']"""
    )
    found = {str(path.relative_to(SRC)) for path in MODULES if reading.search(path.read_text(encoding="utf-8"))}
    assert {name for name in found if not name.startswith("runs/")} == {"data/user/arrays.py"}


def test_plain_words() -> None:
    found = {path: re.findall(WORDS, path.read_text(encoding="utf-8"), re.I) for path in [*MODULES, *PAGES]}
    assert {str(path.relative_to(ROOT)): words for path, words in found.items() if words} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists() and not (SRC / path).exists()] == []


def test_one_version() -> None:
    """Of the package, the citation and the changelog."""
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M) == [VERSION]
    assert re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[0] == VERSION
