"""Docstrings as Markdown, for the page of the Python API: a griffe extension, named in mkdocs.yml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension

ITEM = re.compile(r"((?:\*\*)?[a-z]\w*(?:, [a-z]\w*)*): (?=\S)", re.I)  # name: text, or name, name: text
RULE = re.compile(r"-{3,}")


def as_markdown(text: str) -> str:
    """Lists of parameters, headings underlined with ---, and examples after >>>, each as Markdown has them."""
    return "\n\n".join("\n".join(paragraph(block.splitlines())) for block in re.split(r"\n\s*\n", text.strip("\n")))


def paragraph(lines: list[str]) -> Iterator[str]:
    if len(lines) > 1 and RULE.fullmatch(lines[1].strip()):
        yield from (f"**{lines[0].strip()}**", "")
        lines = lines[2:]
    if lines and lines[0].lstrip().startswith(">>>"):
        yield from ("```pycon", *lines, "```")
        return
    listed = False
    for number, line in enumerate(lines):
        if line.lstrip().startswith(">>>"):
            yield ""
            yield from paragraph(lines[number:])
            return
        found = ITEM.match(line)
        if found:
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            yield from [""] * (number > 0 and not listed)
            yield f"- {names}: {line[found.end() :]}"
        else:
            yield f"  {line.strip()}" if listed else line.strip()
        listed = listed or bool(found)


class PlainDocstrings(Extension):  # type: ignore[misc, unused-ignore]  # Any where it is not installed
    """Turns the docstrings of all objects into Markdown when they are collected."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
