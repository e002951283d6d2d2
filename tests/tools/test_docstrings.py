"""The page of the Python API: every public name is on it, and docstrings keep their form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import coterie
from coterie.core.method import Method

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def named() -> list[str]:
    return re.findall(r"^::: coterie\.(\w+)$", PAGE.read_text(encoding="utf-8"), re.M)


def is_shipped_method(name: str) -> bool:
    """Those are on the page of methods."""
    found = getattr(coterie, name)
    return isinstance(found, type) and issubclass(found, Method) and found is not Method


def test_every_public_name_is_on_the_page_once() -> None:
    public = [name for name in coterie.__all__ if name != "__version__" and not is_shipped_method(name)]
    assert sorted(named()) == sorted(public)


def test_a_docstring_becomes_markdown() -> None:
    pytest.importorskip("griffe")
    from tools.docstrings import as_markdown

    text = """Load a dataset.

dataset: a name, or the path
of your own data.
lr, momentum: two settings.

Returns
-------
Result: what was trained.

>>> 1 + 1
2
"""
    assert (
        as_markdown(text)
        == """Load a dataset.

- `dataset`: a name, or the path
  of your own data.
- `lr`, `momentum`: two settings.

**Returns**

- `Result`: what was trained.

```pycon
>>> 1 + 1
2
```"""
    )
    assert as_markdown("It is: not a list, in the middle of a line: at all.") == (
        "It is: not a list, in the middle of a line: at all."
    )
    assert as_markdown("In two lines.\n>>> 1\n1") == "In two lines.\n\n```pycon\n>>> 1\n1\n```"
