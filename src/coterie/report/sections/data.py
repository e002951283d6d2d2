"""The data of the clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import torch

from coterie.methods.fedreg.rebalance import THRESHOLDS, histograms
from coterie.report import charts
from coterie.report.elements import figure, folded, listed, paragraph, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import dataset
from coterie.runs.run import Run
from coterie.runs.tables import ClassTable

PICTURE = 250_000  # characters of a partition's picture; keeps a report below a megabyte
CLIENTS = 200  # small histograms


def data(runs: Sequence[Run]) -> Markup:
    """The data of the clients, once for runs on the same data."""
    kinds: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        kinds.setdefault(dataset(run), []).append(run)
    drawn = [part for same in kinds.values() for part in (portrait(same[0]), histograms_of(same))]
    return section("data", "Data", *drawn) if any(drawn) else join()


def portrait(run: Run) -> Markup:
    """The partition's picture as an image, so that its scripts cannot run and its style stays separate."""
    if not run.section("data") and not run.picture:
        return join()
    name, mark = dataset(run)
    partition = run.section("data").get("partition")
    rule = f"{name}, {partition.get('name')}" if isinstance(partition, dict) else name
    rule_line = (
        paragraph(tag("strong", rule), " · SHA-256 of the partition: ", tag("code", mark)) if partition else join()
    )
    if not run.picture:
        return rule_line
    if len(run.picture) > PICTURE:
        return join(rule_line, paragraph("The picture of the partition is too large for a report; see partition.svg"))
    image = tag(
        "img", src=f"data:image/svg+xml,{quote(run.picture, safe=' =:/;,.()-+*')}", alt=f"{rule}: classes of clients"
    )
    caption = "Classes of the clients: the area of a circle is the number of training samples."
    return join(
        rule_line, figure(caption, tag("div", image, class_="wide", tabindex="0", role="region", aria_label=caption))
    )


def histograms_of(same: Sequence[Run]) -> Markup:
    """FedReG's figure 4: the classes of each client, before and after rebalancing."""
    classes = next((run.class_table for run in same if run.class_table), None)
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
    outline = "" if after is None else " Outlines show the classes after rebalancing."
    caption = (
        f"Training samples of each class on each client, from left to right: {listed(classes.names)}; "
        f"the highest bar is {highest} samples.{outline}{more}"
    )
    rows = [[str(i), *map(str, own.tolist())] for i, own in enumerate(classes.counts)]
    numbers = table("Training samples of each class", ["client", *classes.names], rows)
    return figure(caption, tag("div", *drawn, class_="histograms"), folded("Numbers of every client", numbers))


def rebalanced(run: Run, classes: ClassTable) -> Any:
    """(m, K) samples after rebalancing; None if the method does not rebalance."""
    method = run.section("method")
    if not method.get("rebalance") or method.get("threshold") not in THRESHOLDS:
        return None
    return histograms(torch.from_numpy(classes.counts), method["threshold"]).after.numpy()
