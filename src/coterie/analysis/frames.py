"""Rows as a pandas DataFrame where pandas is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of these rows; a list of dicts where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame(list(rows))
