"""Bubble chart of a partition: one circle per client and class, its area proportional to the number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import sqrt
from textwrap import wrap

import numpy as np
from numpy.typing import NDArray

from coterie.core.printable import printable, shortened

LONGEST = 16  # characters of a client's name
LINE = 48  # characters in a line of the title, which fit on a phone
STYLE = (
    ".coterie-partition{font:12px system-ui,sans-serif;fill:#222}"
    ".coterie-partition circle{fill:#3d6fb4}"
    ".coterie-partition line{stroke:#8886}"
    "@media(prefers-color-scheme:dark){.coterie-partition{fill:#ddd}.coterie-partition circle{fill:#7fa8e0}}"
)


def picture(title: str, counts: NDArray[np.int64], names: Sequence[str], client_names: Sequence[str] = ()) -> str:
    """An SVG of counts (m, K): clients from left to right, classes from top to bottom, numbers as tooltips.

    client_names: default: their numbers.
    """
    clients, classes = counts.shape
    labels = [str(name) for name in client_names] if len(client_names) == clients else [str(i) for i in range(clients)]
    longest = min(LONGEST, max(map(len, labels))) if client_names else 0
    cell = max(6, min(26, 1000 // clients))
    heading = [*wrap(title, LINE), *wrap(f"circle area: number of samples, at most {counts.max()}", LINE)]
    left, top = 16 + 7 * max(5, *map(len, names)), 28 + 16 * len(heading)
    right, bottom = left + cell * clients, top + cell * classes
    width, height = max(right + 12, 16 + 7 * max(map(len, heading))), bottom + 44 + 7 * longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="coterie-partition" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}"><title>{shown(title)}</title><style>{STYLE}</style>',
        *(_text(8, 18 + 16 * i, line, "start") for i, line in enumerate(heading)),
        _text(left - 8, top - 8, "class", "end"),
        _text((left + right) / 2, bottom + 34 + 7 * longest, "client", "middle"),
    ]
    for k, name in enumerate(names):
        y = top + cell * (k + 0.5)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:g}" y2="{y:g}"/>')
        if k % -(-13 // cell) == 0:  # room for a line of text
            parts.append(_text(left - 8, y + 4, name, "end"))
    every = -(-(14 if longest else 26) // cell)  # room for a line of text, or for a number
    at = [left + cell * (i + 0.5) for i in range(clients)]
    if longest:
        parts += [
            _text(at[i] + 4, bottom + 8, shortened(labels[i], LONGEST), "end", -90) for i in range(0, clients, every)
        ]
    else:
        parts += [_text(at[i], bottom + 16, labels[i], "middle") for i in range(0, clients, every)]
    scale = 0.48 * cell / sqrt(max(1, counts.max()))
    parts += [
        f'<circle cx="{left + cell * (i + 0.5):g}" cy="{top + cell * (k + 0.5):g}" '
        f'r="{scale * sqrt(counts[i, k]):.2f}">'
        f"<title>client {shown(labels[i])}, {shown(names[k])}: {counts[i, k]}</title></circle>"
        for i, k in np.argwhere(counts)
    ]
    return "\n".join([*parts, "</svg>\n"])


def shown(text: str) -> str:
    return escape(printable(text))


def _text(x: float, y: float, content: str, anchor: str, turn: int = 0) -> str:
    rotated = f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{rotated}>{shown(content)}</text>'
