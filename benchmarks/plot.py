"""Line plots on logarithmic axes, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

STYLE = (
    ".coterie-plot{font:12px system-ui,sans-serif;fill:#222}"
    ".coterie-plot .grid{stroke:#8886}"
    ".coterie-plot .a{stroke:#3d6fb4;fill:#3d6fb4}.coterie-plot .b{stroke:#b4643d;fill:#b4643d}"
    ".coterie-plot polyline{fill:none!important;stroke-width:2}.coterie-plot text{stroke:none}"
    "@media(prefers-color-scheme:dark){.coterie-plot{fill:#ddd}"
    ".coterie-plot .a{stroke:#7fa8e0;fill:#7fa8e0}.coterie-plot .b{stroke:#e0a27f;fill:#e0a27f}}"
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 330, 64, 440, 48, 280
Curve = Sequence[tuple[float, float]]


def plot(title: str, across: str, up: str, curves: Mapping[str, Curve]) -> str:
    """An SVG of up to two curves of positive numbers, labeled at their ends, with values as tooltips."""
    points = [point for curve in curves.values() for point in curve]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y = 10.0 ** floor(log10(min(y for _, y in points)))
    high_y = 10.0 ** max(ceil(log10(max(y for _, y in points))), log10(low_y) + 1)

    def right(x: float) -> float:
        return LEFT + (RIGHT - LEFT) * (log10(x / low_x) / log10(high_x / low_x) if high_x > low_x else 0.5)

    def down(y: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * log10(y / low_y) / log10(high_y / low_y)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="coterie-plot" role="img" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(title)}</title><style>{STYLE}</style>',
        _text(8, 18, title, "start"),
        _text(8, 36, up, "start"),
        _text((LEFT + RIGHT) / 2, BOTTOM + 38, across, "middle"),
    ]
    for power in range(round(log10(low_y)), round(log10(high_y)) + 1):
        y = down(10.0**power)
        parts += [_line(LEFT, y, RIGHT, y), _text(LEFT - 8, y + 4, f"{10.0**power:g}", "end")]
    for x in sorted({x for x, _ in points}):
        parts += [_line(right(x), TOP, right(x), BOTTOM), _text(right(x), BOTTOM + 18, f"{x:g}", "middle")]
    for kind, (name, curve) in zip("ab", curves.items(), strict=False):
        places = [(right(x), down(y)) for x, y in curve]
        parts.append(f'<g class="{kind}"><polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5"><title>{escape(name)}, {x:g}: {y:.3g}</title></circle>'
            for (px, py), (x, y) in zip(places, curve, strict=True)
        ]
        parts += [_text(places[-1][0] + 10, places[-1][1] + 4, name, "start"), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
