"""Labels that are text: refused if they look like numbers or identifiers, unless the user names the task."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.user.frames import DECIMAL_COMMA, FEW_CATEGORIES, IN_WORDS, MIXED, number
from coterie.data.user.reading import Array, Part

MANY = 20  # with more distinct texts that start with a digit, they are not taken for classes
FEW_WORDS = 0.1  # a share of text below this, among numbers, is an error
AMOUNT = re.compile(r"[<>~≈]?\s*[-+]?[0-9]")
UNIT = re.compile(r"[<>~≈]?\s*[-+]?[0-9]+(?:[,.' ][0-9]+)*\s*(%|[^\W\d]{1,5})")
THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:[,' ][0-9]{3})+(?:\.[0-9]+)?")
CLASSES = "or name --task classification if it is a class"


def check_text_labels(parts: Sequence[Part]) -> None:
    """Refuse to guess classes from text among numbers, from amounts that are written as text, and from identifiers."""
    names, counts = distinct(parts)
    numeric = [name for name in names if number(name) is not None]
    words = [name for name in names if number(name) is None]
    rows = sum(counts.values())
    if commas := [name for name in words if DECIMAL_COMMA.fullmatch(name)]:
        raise refused(parts, commas, f"has a decimal comma; use a decimal point, {CLASSES}")
    share = sum(counts[name] for name in words) / max(rows, 1)
    if numeric and words and (len(numeric) > MIXED or share < FEW_WORDS):
        raise refused(parts, words, f"is text among numbers; correct it or leave the row out, {CLASSES}")
    if numeric and not words and (len(numeric) > MANY or any(float(name) % 1 for name in numeric)):
        raise refused(parts, numeric, "is a number written as text; convert the labels to numbers, or name --task")
    units = {found.group(1) for name in words if (found := UNIT.fullmatch(name))}
    amounts = [name for name in words if AMOUNT.match(name)]
    grouped = all(map(THOUSANDS.fullmatch, words)) or (len(units) == 1 and all(map(UNIT.fullmatch, words)))
    if len(amounts) > MANY or (grouped and len(words) > MIXED):
        raise refused(parts, amounts, f"looks like an amount; write plain numbers, without units, {CLASSES}")
    if len(names) > max(FEW_CATEGORIES, rows / 2):
        raise refused(
            parts,
            list(names),
            f"is one of {len(names):,} different labels in {rows:,} rows, as identifiers are; is this the right label "
            "column? Name --task classification if these are classes",
        )


def distinct(parts: Sequence[Part]) -> tuple[list[str], dict[str, int]]:
    """The labels of all parts as text, in order, and how often each occurs; missing ones are left out."""
    counts: dict[str, int] = {}
    for part in parts:
        y = part.y[~np.isnan(part.y)] if part.y.dtype.kind == "f" else part.y
        for name, count in zip(*np.unique(y.astype(str), return_counts=True), strict=True):
            counts[str(name)] = counts.get(str(name), 0) + int(count)
    counts = {name: count for name, count in counts.items() if not is_missing(name)}
    return list(counts), counts


def is_missing(name: str) -> bool:
    return name.strip().lower() in IN_WORDS


def refused(parts: Sequence[Part], names: Sequence[str], why: str) -> CoterieError:
    """The error for the first row with one of these labels."""
    place, name = first_label(parts, names)
    return CoterieError(f"{place}: the label '{name[:30]}' {why}")


def first_label(parts: Sequence[Part], names: Sequence[str]) -> tuple[str, str]:
    """The place of the first row with one of these labels, and the label."""
    for part in parts:
        rows = np.flatnonzero(np.isin(part.y.astype(str), names))
        if len(rows):
            return part.place(int(rows[0])), str(part.y[rows[0]])
    return parts[0].place(0), names[0]


def no_number(part: Part) -> int:
    """The first row of a part whose label is not a number; 0 if all are."""
    return next((row for row, name in enumerate(part.y.tolist()) if number(name) is None), 0)


def without_missing(values: Array, known: Sequence[str]) -> Array:
    """(n,) text, "" for spellings of a missing value that are not a known class."""
    gone = [name for name in np.unique(values).tolist() if is_missing(name) and name not in known]
    return np.where(np.isin(values, gone), "", values) if gone else values
