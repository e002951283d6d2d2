"""A picture of a partition: a circle for each client and class, its area the number of training samples."""

from __future__ import annotations

from html import escape
from math import sqrt

from coterie.data.partition import Labels, Partition

STYLE = (
    ".coterie-partition{font:12px system-ui,sans-serif;fill:#222}"
    ".coterie-partition circle{fill:#3d6fb4}"
    ".coterie-partition line{stroke:#8884}"
    "@media(prefers-color-scheme:dark){.coterie-partition{fill:#ddd}.coterie-partition circle{fill:#7fa8e0}}"
)


def picture(partition: Partition, labels: Labels) -> str:
    """An SVG: clients from left to right, classes from top to bottom, numbers as tooltips."""
    numbers = partition.statistics(labels)
    counts = numbers.train_counts  # (m, K)
    clients, classes = counts.shape
    cell = max(6, min(26, 1000 // clients))
    left, top = 16 + 7 * max(map(len, labels.names)), 44
    width, height = left + max(cell * clients, 420) + 12, top + cell * classes + 44
    scale = cell * 0.48 / sqrt(max(1, counts.max()))
    title = (
        f"{labels.name}, {partition.name}: {clients} clients, {numbers.train_slots} training samples "
        f"({numbers.train_distinct} distinct), at most {counts.max()} in one circle"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="coterie-partition" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}"><title>{escape(title)}</title><style>{STYLE}</style>',
        f'<text x="8" y="18">{escape(title)}</text>',
    ]
    for k, name in enumerate(labels.names):
        y = top + cell * k + cell / 2
        parts.append(f'<line x1="{left}" x2="{left + cell * clients}" y1="{y:g}" y2="{y:g}"/>')
        if k % (-(-14 // cell)) == 0:
            parts.append(f'<text x="{left - 8}" y="{y + 4:g}" text-anchor="end">{escape(name)}</text>')
        for i in counts[:, k].nonzero()[0]:
            parts.append(
                f'<circle cx="{left + cell * i + cell / 2:g}" cy="{y:g}" r="{scale * sqrt(counts[i, k]):.2f}">'
                f"<title>client {i}, {escape(name)}: {counts[i, k]}</title></circle>"
            )
    every = max(1, -(-26 // cell))
    bottom = top + cell * classes + 16
    for i in range(0, clients, every):
        parts.append(f'<text x="{left + cell * i + cell / 2:g}" y="{bottom}" text-anchor="middle">{i}</text>')
    parts.append(f'<text x="{left + cell * clients / 2:g}" y="{bottom + 18}" text-anchor="middle">client</text>')
    parts.append(f'<text x="{left - 8}" y="{top - 8}" text-anchor="end">class</text></svg>')
    return "\n".join(parts)
