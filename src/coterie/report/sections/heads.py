"""Head-weight heat maps of every round (FedPAC, figures 2 and 3)."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence

from coterie.report import heat_maps
from coterie.report.elements import folded, grid, paragraph, section, steps
from coterie.report.heat_maps import LEVELS
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import client_label, named
from coterie.report.seeds import labeled_runs
from coterie.runs.head_weights import HeadWeights
from coterie.runs.stored_run import StoredRun

CELLS = 400_000  # in all heat maps together; keeps a report below a megabyte
MOST_METHODS = 3  # of which head weights are shown without unfolding them
CLIENTS = 200  # in one heat map


def head_weights(runs: Sequence[StoredRun]) -> Markup:
    """Head-weight heat maps of every round: of the first seed of each method, and folded, of the others."""
    names = {id(run): name for run, name in named(runs)}
    found = [run for run in runs if run.head_weights]
    if not found:
        return join()
    drawn = [run for run in found if largest(run.head_weights) <= CLIENTS]
    groups = [[run for run in group if run in drawn] for group in labeled_runs(runs).values()]
    first, others = [run for g in groups for run in g[:1]], [run for g in groups for run in g[1:]]
    shown = [[heat(run, names[id(run)], CELLS // len(found)) for run in part] for part in (first, others)]
    more = paragraph(f"Weights of rounds with more than {CLIENTS} clients are not drawn; reports.npz has them.")
    many = len(groups) > MOST_METHODS  # head weights are details of few of them
    first_drawn = folded("Head weights of every round", grid(shown[0])) if many and shown[0] else grid(shown[0])
    seeds = [folded("Head weights of the other seeds", grid(shown[1]))] if others else []
    notes = [more] if len(drawn) < len(found) else []
    return section("heads", "Head weights", first_drawn, *seeds, *notes)


def largest(weights: Sequence[HeadWeights]) -> int:
    return max(len(w.clients) for w in weights)


def heat(run: StoredRun, name: str, cells: int) -> Markup:
    weights = run.head_weights
    shown = thinned(weights, cells)
    read = [
        {
            "round": w.round,
            "clients": [client_label(run, client, "") for client in w.clients],
            "cells": b64encode(heat_maps.shades(w.matrix).tobytes()).decode(),
        }
        for w in shown
    ]
    final, clients = shown[-1], [client_label(run, client, "") for client in shown[-1].clients]
    longest = max(len(client_label(run, client, "")) for w in shown for client in w.clients)
    title = f"{name}: head weights after round {final.round}"
    about = "The shade of a cell is the weight of the column client's head in the row client's head."
    drawn = heat_maps.heat_map(title, about, heat_maps.shades(final.matrix).tolist(), clients, longest)
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
