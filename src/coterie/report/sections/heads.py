"""Head-weight heat maps of every round (FedPAC, figures 2 and 3)."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence

from coterie.report import charts
from coterie.report.charts import LEVELS
from coterie.report.elements import folded, grid, paragraph, section, steps
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import named
from coterie.runs.head_weights import HeadWeights
from coterie.runs.run import Run

CELLS = 400_000  # in all heat maps together; keeps a report below a megabyte
CLIENTS = 200  # in one heat map


def head_weights(runs: Sequence[Run]) -> Markup:
    """Head-weight heat maps of every round (FedPAC, figures 2 and 3)."""
    found = [(run.head_weights, name) for run, name, _ in named(runs) if run.head_weights]
    drawn = [heat(weights, name, CELLS // len(found)) for weights, name in found if largest(weights) <= CLIENTS]
    if len(drawn) == len(found) == 0:
        return join()
    more = paragraph(f"Weights of rounds with more than {CLIENTS} clients are not drawn; reports.npz has them.")
    return section("heads", "Head weights", grid(drawn), *([more] if len(drawn) < len(found) else []))


def largest(weights: Sequence[HeadWeights]) -> int:
    return max(len(w.clients) for w in weights)


def heat(weights: Sequence[HeadWeights], name: str, cells: int) -> Markup:
    shown = thinned(weights, cells)
    read = [
        {"round": w.round, "clients": w.clients, "cells": b64encode(charts.shades(w.matrix).tobytes()).decode()}
        for w in shown
    ]
    final = shown[-1]
    title = f"{name}: head weights after round {final.round}"
    about = "The shade of a cell is the weight of the column client's head in the row client's head."
    drawn = charts.heat_map(title, about, charts.shades(final.matrix).tolist(), [str(c) for c in final.clients])
    slider = tag(
        "label", "Round ", tag("output", str(final.round)),
        tag("input", type="range", min=0, max=len(shown) - 1, value=len(shown) - 1, step=1, class_="rounds",
            aria_valuetext=f"round {final.round}"),
    )  # fmt: skip
    scale = steps([f"{level**2}" for level in range(LEVELS)], "h")
    part = "" if len(shown) == len(weights) else f" {len(shown)} of {len(weights)} rounds, evenly chosen."
    caption = f"{about} The scale gives the percentage at which each shade starts. Clients are sorted by group.{part}"
    numbers = folded("Numbers of this round, percent", tag("div", class_="wide numbers", tabindex="0"))
    body = (tag("h3", name), slider, drawn, scale, tag("figcaption", caption), numbers)
    return tag("figure", *body, class_="heat", data_heat=json.dumps(read, separators=(",", ":")))


def thinned(weights: Sequence[HeadWeights], cells: int) -> list[HeadWeights]:
    """Evenly chosen rounds that fit, including the first and the last."""
    room = max(2, cells // largest(weights) ** 2)
    if len(weights) <= room:
        return list(weights)
    return [weights[round(i * (len(weights) - 1) / (room - 1))] for i in range(room)]
