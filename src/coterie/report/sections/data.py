"""The data of the clients."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.report.elements import figure, folded, listed, paragraph, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import client_label, dataset
from coterie.report.row_charts import histogram
from coterie.runs.stored_run import StoredRun
from coterie.runs.tables import ClassTable

PICTURE = 250_000  # characters of a partition's picture; keeps a report below a megabyte
CLIENTS = 200  # small histograms
MOST_SHOWN = 40  # histograms that are shown without unfolding them


def data(runs: Sequence[StoredRun]) -> Markup:
    """The data of the clients, once for runs on the same data; partitions after the first are folded."""
    kinds: dict[tuple[str, str], list[StoredRun]] = {}
    for run in runs:
        kinds.setdefault(dataset(run), []).append(run)
    drawn = [made for same in kinds.values() if (made := join(portrait(same[0]), histograms(same)))]
    more = [folded(f"The other {len(drawn) - 1} partitions", *drawn[1:])] if len(drawn) > 1 else []
    return section("data", "Data", drawn[0], *more) if drawn else join()


def portrait(run: StoredRun) -> Markup:
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


def histograms(same: Sequence[StoredRun]) -> Markup:
    """The classes of each client, and as outlines those that a method makes of them (FedReG, figure 4)."""
    run = next((run for run in same if run.class_table), None)
    if run is None or run.class_table is None:
        return join()
    classes = run.class_table
    changed = next(((run.title, found) for run in same if (found := trained_on(run, classes)) is not None), None)
    title, after = changed or ("", None)
    highest = int(max(classes.counts.max(), 0 if after is None else after.max()))
    names = [client_label(run, i, "") for i in range(len(classes.counts))]
    drawn = [
        tag(
            "div",
            histogram(f"client {name}", own.tolist(), highest, None if after is None else after[i].tolist()),
            tag("span", f"client {name} · {own.sum()}"),
        )
        for i, (name, own) in enumerate(zip(names[:CLIENTS], classes.counts, strict=False))
    ]
    more = f" The first {CLIENTS} of {len(classes.counts)} clients." if len(classes.counts) > CLIENTS else ""
    outline = "" if after is None else f" Outlines show the classes that {title} trains on."
    caption = (
        f"Training samples of each class on each client, from left to right: {listed(classes.names)}; "
        f"the highest bar is {highest} samples.{outline}{more}"
    )
    rows = [[name, *map(str, own.tolist())] for name, own in zip(names, classes.counts, strict=True)]
    numbers = table("Training samples of each class", ["client", *classes.names], rows)
    made = figure(caption, tag("div", *drawn, class_="histograms"), folded("Numbers of every client", numbers))
    shown = after is not None or (len(same) == 1 and len(drawn) <= MOST_SHOWN)
    return made if shown else folded("Classes of every client", made)


def trained_on(run: StoredRun, classes: ClassTable) -> NDArray[np.int64] | None:
    """(m, K) samples of each class that the method trains on; None if these are the clients' own."""
    try:
        found = run.method.training_classes(torch.from_numpy(classes.counts))
    except (CoterieError, KeyError, TypeError, ValueError):  # code that is not loaded, or a damaged config.json
        return None
    return None if found is None else found.numpy()
