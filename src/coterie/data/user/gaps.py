"""Missing and infinite values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coterie.core.data import Column
from coterie.data.user.reading import EXAMPLES, Array, Notes, Reading

GAPS = "missing values; fill them in, or train with --missing median"


def check_values(
    x: Array, columns: tuple[Column, ...], reading: Reading, place: Callable[[int], str], notes: Notes
) -> tuple[Column, ...]:
    """Report missing and infinite values. Returns the columns; unnamed ones get names if gaps are filled."""
    if x.dtype.kind != "f":
        return columns
    flat = x.reshape(len(x), -1)

    def describe(i: int) -> str:
        at = int(np.flatnonzero(~np.isfinite(flat[i]))[0])
        return f"{place(i)}, column '{columns[at].name}'" if columns else place(i)

    notes.wrong_at("infinite value", np.flatnonzero(np.isinf(flat).any(1)), describe)
    gaps = np.isnan(flat)
    if not gaps.any():
        return columns
    if x.ndim > 2:
        notes.wrong_at("missing value; fill it in or leave the sample out", np.flatnonzero(gaps.any(1)), place)
    elif reading.missing == "refuse":
        for at in np.flatnonzero(gaps.any(0)).tolist():
            name = columns[at].name if columns else str(at)
            rows = np.flatnonzero(gaps[:, at])
            notes.wrong(GAPS, f"column '{name}': {len(rows):,} missing, the first in {place(int(rows[0]))}")
        notes.problems[GAPS].examples = notes.problems[GAPS].examples[:EXAMPLES]
    elif not columns:
        columns = tuple(Column(f"x{i}") for i in range(x.shape[1]))
    return columns
