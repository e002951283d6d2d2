"""How methods look in charts: one source of colors, dashes and markers for reports and for figures of papers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from coterie.core.names import spelling


class SeriesColor(NamedTuple):
    """A color of lines and marks: at least 3:1 against white, and against the ground of dark pages."""

    light: str
    dark: str


# The color-blind-safe palette of Okabe and Ito, darkened where a hue is faint on white, with gray for yellow.
COLORS = (
    SeriesColor("#0072B2", "#308EDB"),
    SeriesColor("#B94300", "#F07F3C"),
    SeriesColor("#009E73", "#35BF8A"),
    SeriesColor("#C873A3", "#F29AD0"),
    SeriesColor("#AE8200", "#F2C24A"),
    SeriesColor("#3894DC", "#80D4FF"),
    SeriesColor("#1D2126", "#F4F6F8"),
    SeriesColor("#77777B", "#8F979F"),
)
DASHES, MARKERS = 7, 8  # kinds of lines and of marks
FIRST = ("fedpac", "fedavg", "fedrep", "ditto", "fedper", "scaffold", "local", "fedavg-ft")  # one color each


class Look(NamedTuple):
    """Indices of a color, dashes and a marker, which together identify a line."""

    color: int
    dashes: int
    marker: int


def numbered(number: int) -> Look:
    """The look with this number. The first ones differ in color; all of a cycle differ without color, too."""
    size = len(COLORS)
    return Look(number % size, number // size % DASHES, (number + number // size) % MARKERS)


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """The look of each label in a figure or report.

    A method always has the same look, by its id or title. Among variants of a method, such as "FedPAC, lr 0.1", the
    first gets the method's look if it is free, and the others its color with other dashes.
    """
    known, methods = order(), dict[str, int]()
    for name in sorted(map(method_of, labels), key=lambda name: name not in known):  # others take what is left
        if name not in methods:
            methods[name] = known[name] if name in known else free(name, set(methods.values()))
    found: dict[str, int] = {}
    for label in sorted(labels, key=lambda label: spelling(label) != method_of(label)):  # a method before its variants
        number, taken = methods[method_of(label)], {*found.values(), *methods.values()}
        if number in found.values():
            number = next(n for n in itertools.count(number, len(COLORS)) if n not in taken)
        found[label] = number
    return {label: numbered(found[label]) for label in labels}


def method_of(label: str) -> str:
    """The spelling of the method at the start of a label."""
    return spelling(re.split(r", | \(| on ", label, maxsplit=1)[0])


def free(name: str, taken: set[int]) -> int:
    """A number for a method that is not ours, from its letters; of an unused color if it is taken."""
    wanted = len(order()) + sum(map(ord, name))
    if wanted not in taken:
        return wanted
    used = {numbered(number).color for number in taken}
    unused = [number for number in range(len(COLORS)) if number not in used]
    later = [number for number in range(wanted + 1, wanted + len(taken) + 2) if number not in taken]
    return (unused or later)[0]


@cache
def order() -> dict[str, int]:
    """Names of methods -> their numbers; id and title have the same one."""
    from coterie.methods import METHODS, VARIANTS

    titles = {name: kind.title for name, kind in METHODS.items()} | {name: v[2] for name, v in VARIANTS.items()}
    numbers: dict[str, int] = {}
    for number, name in enumerate(dict.fromkeys((*FIRST, *titles))):
        numbers |= {spelling(name): number, spelling(titles[name]): number}
    return numbers
