"""Every message that docs/troubleshooting.md quotes is one that the code can raise or print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"  # what an f-string fills in


def quoted() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)


def text_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)  # type: ignore[misc]
    return None


@pytest.fixture(scope="module")
def said() -> list[str]:
    """All texts of the source, one a line."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py"))
    return [text for tree in trees for node in ast.walk(tree) if (text := text_of(node))]


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, message.split("..."))), re.S)


def test_messages_are_of_the_code(said: list[str]) -> None:
    strangers = []
    for message in quoted():
        fixed = [part for part in re.split(r"\.\.\.", message) if part.strip(" '?:;")]
        assert max(map(len, fixed)) >= 8, f"too short to say anything: {message}"
        hints = message.replace("'...': did you mean '...'?", "'...': ...")  # of two functions
        if not any(pattern(hints).search(text) for text in said):
            strangers.append(message)
    assert strangers == []


def test_the_check_can_fail(said: list[str]) -> None:
    assert not any(pattern("class ... has ... apples").search(text) for text in said)
    assert len(quoted()) > 25
