"""HTML and SVG from Python. Whatever is not markup already is escaped."""

from __future__ import annotations

from html import escape

EMPTY = frozenset({"meta", "link", "input", "img", "br"})  # HTML elements that have no end
Attribute = str | float | bool | None


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: Attribute) -> Markup:
    """An element. Of an attribute's name a last underscore is left out, and others are hyphens: class_, data_tip."""
    inside = join(*content)
    begin = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}"
    return Markup(f"{begin}>" if name in EMPTY else f"{begin}>{inside}</{name}>")


def join(*content: str) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in content))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value if isinstance(value, str) else number(value))}"'


def number(value: float, decimals: int = 2) -> str:
    """A coordinate: no more digits than can be seen."""
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))
