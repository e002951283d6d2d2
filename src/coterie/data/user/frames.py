"""A table in memory: columns of numbers, and columns of text as codes into a list of categories."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from coterie.core.data import Column
from coterie.data.user.reading import Array, Notes

NOTHING = {"", "na", "n/a", "n.a.", "#n/a", "nan", "null", "none", "?", "<na>", "-"}  # spellings of a missing value
IN_WORDS = NOTHING - {"none", "-"}  # the same among words, where these two are values
MOST_CATEGORIES = 100
FEW_CATEGORIES = 10  # accepted in a table of any size
MIXED = 5  # with more distinct numbers than this in a column, its text is an error
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
TEXT = "text in a column of numbers; correct it, or leave the column out with --drop-column"
FREE_TEXT = (
    "column with too many different texts, probably an identifier or free text; leave it out with --drop-column, or "
    "keep the rows of one identifier together with --group-column"
)
EXACT = 2**24  # float32 represents all integers up to here
LOST = 0.01  # of a standard deviation, which rounding to float32 may change
PRECISION = (
    f"numbers beyond {EXACT:,} lose digits in float32; scale them (timestamps: hours since a start), or leave "
    "the column out with --drop-column"
)


class Columns(NamedTuple):
    """The roles of the columns, the same in every file."""

    labels: tuple[str, ...]  # empty: none
    client: str | None
    features: tuple[str, ...]
    group: str | None = None


class Frame(NamedTuple):
    """The rows of one table."""

    x: Array  # (n, F) float32; NaN: missing; text: index in texts
    texts: dict[int, list[str]]  # feature -> its distinct texts
    y: Array | None  # (n, ...) labels as in the file
    owners: Array | None  # (n,) client names
    group: Array | None  # (n,) group names
    place: Callable[[int], str]  # file and line of a row


def number(text: str) -> float | None:
    """Parse a cell: NaN if the value is missing, None for text."""
    try:
        return float(text)
    except ValueError:
        return float("nan") if text.strip().lower() in NOTHING else None


def is_number(text: str) -> bool:
    """Whether a cell is a finite number; a missing value is not."""
    value = number(text)
    return value is not None and math.isfinite(value)


def code(text: str, known: dict[str, int]) -> float:
    """The code of a category, NaN if it is missing."""
    text = text.strip()
    return float("nan") if text.lower() in IN_WORDS else known.setdefault(text, len(known))


def narrow(values: Array, names: Sequence[str], where: str, notes: Notes) -> Array:
    """Columns (n, F) as float32. Reports large numbers that lose digits: whole ones, or their differences."""
    with np.errstate(over="ignore"):  # overflow becomes infinite, which is reported
        made: Array = values.astype(np.float32)
    changed = np.isfinite(made) & (np.abs(values) > EXACT) & (made != values)
    if changed.any():
        spread = np.std(np.where(np.isfinite(made), values, values[changed][0]), 0)
        fractions = (values != np.trunc(values)) & ~((np.abs(made - values) > LOST * spread) & (spread > 0))
        changed &= ~fractions
    for column in np.flatnonzero(changed.any(0)).tolist():
        first = values[changed[:, column], column][0]
        notes.wrong(PRECISION, f"{where}, column '{names[column]}': {first:.12g}")
    return made


def unified(frames: Sequence[Frame], names: Sequence[str], notes: Notes) -> tuple[Column, ...]:
    """The columns of all frames; replaces codes by indices into the sorted categories."""
    text = sorted({column for frame in frames for column in frame.texts})
    categories: dict[int, tuple[str, ...]] = {}
    for column in text:
        categories[column] = tuple(sorted({value for frame in frames for value in frame.texts[column]}))
        number_of = {value: i for i, value in enumerate(categories[column])}
        for frame in frames:
            table = np.array([number_of[value] for value in frame.texts[column]] or [0], np.float32)
            codes = frame.x[:, column]
            known = ~np.isnan(codes)
            codes[known] = table[codes[known].astype(np.int64)]
    for column, values in categories.items():
        check_categories(frames, column, names[column], values, notes)
    return tuple(Column(name, categories.get(i, ())) for i, name in enumerate(names))


def check_categories(frames: Sequence[Frame], column: int, name: str, values: tuple[str, ...], notes: Notes) -> None:
    """Report text that is not a category."""
    numeric = [value for value in values if number(value) is not None]
    commas = [value for value in values if DECIMAL_COMMA.fullmatch(value)]
    rows = sum(len(frame.x) for frame in frames)
    if commas:
        where, value = first_place(frames, column, [values.index(commas[0])])
        notes.wrong("number with a decimal comma; use a decimal point", f"{where}, column '{name}': {values[value]!r}")
    elif len(numeric) > MIXED:
        words = [i for i, value in enumerate(values) if number(value) is None] or list(range(len(values)))
        where, value = first_place(frames, column, words)
        notes.wrong(TEXT, f"{where}, column '{name}': {values[value][:30]!r}")
    elif is_free_text(values, rows):
        where, value = first_place(frames, column, list(range(len(values))))
        example = f"such as {values[value][:30]!r} in {where}"
        notes.wrong(FREE_TEXT, f"column '{name}': {len(values):,} different texts in {rows:,} rows, {example}")
    if len({value.lower() for value in values}) < len(values) <= MOST_CATEGORIES:
        notes.worth_knowing("categories that differ only in case", f"column '{name}': {', '.join(values)}")


def is_free_text(categories: Sequence[str], rows: int) -> bool:
    """Whether a column has too many different texts to be categories."""
    return len(categories) > max(FEW_CATEGORIES, min(MOST_CATEGORIES, rows / 2))


def first_place(frames: Sequence[Frame], column: int, codes: Sequence[int]) -> tuple[str, int]:
    """The place of the first row with one of these categories, and the category."""
    for frame in frames:
        rows = np.flatnonzero(np.isin(frame.x[:, column], codes))
        if len(rows):
            return frame.place(int(rows[0])), int(frame.x[rows[0], column])
    return "", codes[0]
