"""Heat maps as SVG, of shades that are the square root of shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.core.printable import shortened
from coterie.report.charts import svg, text
from coterie.report.markup import Markup, number, tag

LEVELS = 10  # shades
LETTERS = 16  # of a label, at most


def shades(shares: NDArray[np.float64]) -> NDArray[np.uint8]:
    """0..255 for 0..1, by the square root, so that small shares are visible."""
    return np.round(255 * np.sqrt(np.clip(shares, 0, 1))).astype(np.uint8)


def heat_paths(rows: Sequence[Sequence[int]]) -> list[str]:
    """One path per level, with its cells as unit squares; equal neighbors are merged.

    Zero cells have no level. report.js does the same when the round changes.
    """
    paths = [""] * LEVELS
    for i, row in enumerate(rows):
        levels = [value * LEVELS >> 8 if value else -1 for value in row]
        start = 0
        for j in range(1, len(row) + 1):
            if j == len(row) or levels[j] != levels[start]:
                if levels[start] >= 0:
                    paths[levels[start]] += f"M{start} {i}h{j - start}v1h-{j - start}z"
                start = j
    return paths


def heat_map(
    title: str,
    about: str,
    rows: Sequence[Sequence[int]],
    labels: Sequence[str],
    longest: int | None = None,
    **more: float | None,
) -> Markup:
    """A heat map of shades (S, S), one row per client. longest: characters of a label, if others replace them later."""
    size, letters = 400, min(max([longest or 0, *map(len, labels)]), LETTERS)
    slanted = letters > 3
    left, top = (max(52.0, 12 + 7.2 * letters), 46 + 5.2 * letters) if slanted else (52.0, 46.0)
    cell = size / len(rows)
    every = -(-15 // cell) if slanted else -(-34 // cell) if len(rows) > 12 else 1
    named = [(i, shortened(label, LETTERS)) for i, label in enumerate(labels) if i % every == 0]
    across = [_column_label(left + (i + 0.5) * cell, top - 6, label, slanted) for i, label in named]
    down = [text(left - 6, top + (i + 0.5) * cell + 4.5, label, "end") for i, label in named]
    paths = [tag("path", d=d, class_=f"h{level}") for level, d in enumerate(heat_paths(rows))]
    cells = tag(
        "g", *paths, class_="cells", transform=f"translate({number(left)} {number(top)}) scale({number(cell, 5)})"
    )
    ground = tag("rect", x=left, y=top, width=size, height=size, class_="ground")
    names = (
        text(left + size / 2, top + size + 22, "weights of the heads of these clients", class_="axis"),
        text(4, 18, "in the head of client", "start", "axis"),
    )
    labelled = tag("g", *across, *down, class_="labels", data_slanted="yes" if slanted else None)
    content = (ground, cells, labelled, *names)
    wide = left + size + (6 + 4.6 * letters if slanted else 6)
    return svg(title, about, wide, top + size + 30, *content, class_="chart heat", **more)


def _column_label(x: float, y: float, label: str, slanted: bool) -> Markup:
    if not slanted:
        return text(x, y, label)
    return tag("text", label, x=x, y=y, text_anchor="start", transform=f"rotate(-45 {number(x)} {number(y)})")
