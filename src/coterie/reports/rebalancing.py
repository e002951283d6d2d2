"""FedReG's figures: what rebalancing does to the classes of the clients (4), and to their images (6)."""

from __future__ import annotations

import torch

from coterie.core import images, order
from coterie.core.errors import CoterieError
from coterie.core.rebalance import histograms
from coterie.core.samples import FederatedData
from coterie.data import picture
from coterie.reports.png import png, sheet


def class_pictures(data: FederatedData, rule: str = "average") -> dict[str, str]:
    """File name -> SVG: the classes of every client before and after."""
    names = data.class_names or tuple(map(str, range(data.classes)))
    found = histograms(data.train.class_counts(data.classes), rule)
    return {
        f"classes-{when}.svg": picture(f"{data.name}, {when} rebalancing to the {rule}", counts.numpy(), names)
        for when, counts in (("before", found.before), ("after", found.after))
    }


def augmented_samples(data: FederatedData, count: int = 12, seed: int = 0) -> bytes:
    """A PNG with three rows: samples as they are, varied by the simple chain, and by AutoAugment."""
    if data.train.x.ndim != 4:
        raise CoterieError(f"{data.name} has no images to vary")
    drawn = order.shuffle(order.seed_key(seed), len(data.train.y))[:count]
    x, key = data.train.x[drawn], order.fold(order.seed_key(seed), order.REBALANCE)
    return png(sheet([x, images.simple(x, key).to(torch.uint8), images.auto(x, key)]))
