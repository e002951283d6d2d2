"""HTML and SVG from Python. Text that is not `Markup` is escaped."""

from __future__ import annotations

from html import escape

from coterie.core.printable import printable

EMPTY = frozenset({"meta", "link", "input", "img", "br"})  # HTML elements without an end tag
Attribute = str | float | bool | None


class Markup(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: Attribute) -> Markup:
    """An element. In attribute names, a final underscore is dropped and others become hyphens: class_, data_tip."""
    inside = join(*content)
    begin = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}"
    return Markup(f"{begin}>" if name in EMPTY else f"{begin}>{inside}</{name}>")


def join(*content: str) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else shown(part) for part in content))


def shown(text: str) -> str:
    return escape(printable(text, keep="\n"))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{shown(value if isinstance(value, str) else number(value))}"'


def number(value: float, decimals: int = 2) -> str:
    """A coordinate, rounded to visible digits."""
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))
