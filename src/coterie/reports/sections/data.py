"""Which samples the clients have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import torch

from coterie.core.rebalance import THRESHOLDS, histograms
from coterie.reports import charts
from coterie.reports.elements import figure, folded, listed, paragraph, section, table
from coterie.reports.markup import Markup, join, tag
from coterie.reports.reading import Classes, Run

PICTURE = 250_000  # letters of a partition's picture: what keeps a report below a megabyte
CLIENTS = 200  # small histograms


def data(runs: Sequence[Run]) -> Markup:
    """Which samples the clients have; once for runs on the same data."""
    kinds: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        kinds.setdefault(run.data, []).append(run)
    drawn = [part for same in kinds.values() for part in (portrait(same[0]), histograms_of(same))]
    return section("data", "Data", *drawn) if any(drawn) else join()


def portrait(run: Run) -> Markup:
    """The partition's picture as an image: nothing in it can run, and its style stays its own."""
    if not run.section("data") and not run.picture:
        return join()
    name, mark = run.data
    partition = run.section("data").get("partition")
    rule = f"{name}, {partition.get('name')}" if isinstance(partition, dict) else name
    told = paragraph(tag("strong", rule), " · SHA-256 of who has what: ", tag("code", mark)) if partition else join()
    if not run.picture:
        return told
    if len(run.picture) > PICTURE:
        return join(told, paragraph("The picture of the partition is too large to be shown here: partition.svg"))
    image = tag(
        "img", src=f"data:image/svg+xml,{quote(run.picture, safe=' =:/;,.()-+*')}", alt=f"{rule}: classes of clients"
    )
    caption = "Classes of the clients: the area of a circle is the number of training samples."
    return join(
        told, figure(caption, tag("div", image, class_="wide", tabindex="0", role="region", aria_label=caption))
    )


def histograms_of(same: Sequence[Run]) -> Markup:
    """FedReG's figure 4: classes of every client, and what rebalancing makes of them."""
    classes = next((run.classes for run in same if run.classes), None)
    if classes is None:
        return join()
    after = next((found for run in same if (found := rebalanced(run, classes)) is not None), None)
    highest = int(max(classes.counts.max(), 0 if after is None else after.max()))
    drawn = [
        tag(
            "div",
            charts.histogram(f"client {i}", own.tolist(), highest, None if after is None else after[i].tolist()),
            tag("span", f"client {i} · {own.sum()}"),
        )
        for i, own in enumerate(classes.counts[:CLIENTS])
    ]
    more = f" The first {CLIENTS} of {len(classes.counts)} clients." if len(classes.counts) > CLIENTS else ""
    outline = "" if after is None else " The outline is what rebalancing makes of them."
    caption = (
        f"Training samples of each class on each client, from left to right: {listed(classes.names)}; "
        f"the highest bar is {highest} samples.{outline}{more}"
    )
    rows = [[str(i), *map(str, own.tolist())] for i, own in enumerate(classes.counts)]
    numbers = table("Training samples of each class", ["client", *classes.names], rows)
    return figure(caption, tag("div", *drawn, class_="histograms"), folded("Numbers of every client", numbers))


def rebalanced(run: Run, classes: Classes) -> Any:
    """(m, K) samples in the rebalanced sets, where the method makes such."""
    method = run.section("method")
    if not method.get("rebalance") or method.get("threshold") not in THRESHOLDS:
        return None
    return histograms(torch.from_numpy(classes.counts), method["threshold"]).after.numpy()
