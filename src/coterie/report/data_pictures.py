"""Pictures of the data that clients have, and of what a method makes of them."""

from __future__ import annotations

import torch

from coterie.core import random
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.data import picture
from coterie.report.png import png, sheet


def class_pictures(data: FederatedData, method: AnyMethod) -> dict[str, str]:
    """File name -> SVG of the clients' classes, before and after the method changes them; empty if it does not."""
    names = data.class_names or tuple(map(str, range(data.classes)))
    before = data.train.class_counts(data.classes)
    after = method.training_classes(before)
    if after is None:
        return {}
    return {
        f"classes-{when}.svg": picture(f"{data.name}, {when} {method.title}", counts.numpy(), names, data.client_names)
        for when, counts in (("before", before), ("after", after))
    }


def augmented_samples(data: FederatedData, method: AnyMethod, count: int = 12, seed: int = 0) -> bytes | None:
    """A PNG with a row of samples, and one for each way in which the method varies them; None if it does not."""
    if data.train.x.ndim != 4:
        raise CoterieError(f"{data.name} has no images to augment")
    drawn = random.shuffle(random.seed_key(seed), len(data.train.y))[:count]
    x, key = data.train.x[drawn], random.fold(random.seed_key(seed), random.REBALANCE)
    varied = method.augmentations(x, key)
    return png(sheet([x, *(images.to(torch.uint8) for images in varied.values())])) if varied else None
