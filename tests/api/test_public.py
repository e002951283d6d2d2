"""The names that `import coterie` gives, and what their help says."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.api.settings import GROUPS
from coterie.methods import METHODS

ROOT = Path(__file__).parents[2]
CLASSES = {kind.__name__ for kind in METHODS.values()}


def test_every_public_name_exists_once() -> None:
    assert len(set(coterie.__all__)) == len(coterie.__all__)
    assert dir(coterie) == sorted(coterie.__all__)
    for name in coterie.__all__:
        assert getattr(coterie, name) is not None
    assert set(coterie.__all__) == {*coterie._HOME, *coterie._MODULES, *CLASSES, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'fedpac'"):
        coterie.fedpac  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    body = ast.parse((ROOT / "src/coterie/__init__.py").read_text(encoding="utf-8")).body
    (block,) = [node for node in body if isinstance(node, ast.If)]
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen - {"*"} | CLASSES == set(coterie.__all__) - {"__version__"}


def test_every_method_is_public() -> None:
    assert set(coterie.__all__) >= CLASSES
    assert set(coterie.methods.__all__) >= CLASSES
    for kind in METHODS.values():
        assert getattr(coterie, kind.__name__) is getattr(coterie.methods, kind.__name__) is kind


def test_import_does_not_wait_for_torch() -> None:
    script = "import sys, coterie; dir(coterie); print(*({'torch', 'numpy', 'rich', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_every_method_has_a_docstring_with_its_paper(kind: type[Any]) -> None:
    text = inspect.getdoc(kind) or ""
    purpose, *rest = text.split("\n\n")
    assert not purpose.startswith(f"{kind.__name__}(")
    assert purpose.rstrip().endswith((".", ":"))
    if kind is not coterie.Local:  # no communication, no paper
        assert re.search(r"\b(19|20)\d\d\b", " ".join(rest)), "no year of a citation"
    for field in fields(kind):
        assert f"\n{field.name}: " in text


def test_help_of_run_names_every_parameter() -> None:
    text = inspect.getdoc(coterie.run) or ""
    listed = re.findall(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): ", text, re.M)
    named = [name for line in listed for name in line.split(", ")]
    assert sorted(named) == sorted(inspect.signature(coterie.run).parameters)


def test_run_takes_every_setting_by_name_with_its_type() -> None:
    """A field that a dataclass gets must be a parameter too, of the same type or None."""
    taken = typing.get_type_hints(coterie.run)
    for group, kind in GROUPS.items():
        assert taken[group] == kind | None
        for name, hint in typing.get_type_hints(kind).items():
            if name in {field.name for field in fields(kind)}:
                assert taken[name] == hint | None, name


@pytest.mark.parametrize(
    "thing", [coterie, coterie.run, coterie.compare, coterie.load_clients, coterie.Result, coterie.FedPAC],
    ids=lambda thing: thing.__name__,
)  # fmt: skip
def test_examples_in_docstrings_run(thing: Callable[..., Any]) -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs={})
    assert found.examples
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found)
    assert result.failed == 0
