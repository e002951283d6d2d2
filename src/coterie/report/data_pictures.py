"""FedReG's figures 4 and 6: the effect of rebalancing on the clients' classes and images."""

from __future__ import annotations

import torch

from coterie.core import random
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.data import picture
from coterie.methods.fedreg import augment
from coterie.methods.fedreg.rebalance import histograms
from coterie.report.png import png, sheet


def class_pictures(data: FederatedData, rule: str = "average") -> dict[str, str]:
    """File name -> SVG of the clients' classes, before and after rebalancing."""
    names = data.class_names or tuple(map(str, range(data.classes)))
    found = histograms(data.train.class_counts(data.classes), rule)
    return {
        f"classes-{when}.svg": picture(f"{data.name}, {when} rebalancing to the {rule}", counts.numpy(), names)
        for when, counts in (("before", found.before), ("after", found.after))
    }


def augmented_samples(data: FederatedData, count: int = 12, seed: int = 0) -> bytes:
    """A PNG with three rows: samples, simple augmentation, AutoAugment."""
    if data.train.x.ndim != 4:
        raise CoterieError(f"{data.name} has no images to augment")
    drawn = random.shuffle(random.seed_key(seed), len(data.train.y))[:count]
    x, key = data.train.x[drawn], random.fold(random.seed_key(seed), random.REBALANCE)
    return png(sheet([x, augment.simple(x, key).to(torch.uint8), augment.auto(x, key)]))
