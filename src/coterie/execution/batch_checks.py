"""Refuse batches that some clients cannot be trained on."""

from __future__ import annotations

from dataclasses import replace

import torch

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.model import Model


def check_batches(method: AnyMethod, data: FederatedData) -> None:
    """Refuse drop_last where a client has fewer samples than a batch: it would silently never train."""
    if not method.train.drop_last:
        return
    small = [i for i, n in enumerate(data.train.sizes) if n < method.train.batch_size]
    if small:
        raise CoterieError(
            f"batch size {method.train.batch_size} with drop-last leaves nothing to train on: client {small[0]} has "
            f"{data.train.sizes[small[0]]} samples ({len(small)} such clients); use a smaller batch or no drop-last"
        )


def check_lone_samples(method: AnyMethod, model: Model, data: FederatedData) -> None:
    """Refuse BatchNorm on a batch of one sample: torch raises in it, perhaps after many rounds."""
    batch, dropped = method.train.batch_size, method.train.drop_last
    lone = [i for i, n in enumerate(data.train.sizes) if batch == 1 or (n % batch == 1 and not dropped)]
    if not (lone and model.batch_norm):
        return
    weights = tree.fill(model.start, {n: t.clone() for n, t in tree.items(model.start)}, leaf=tree.Live)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            replace(model, hashed=False)(weights, data.train.x[:1].to(model.mean.device))
    except ValueError:
        raise CoterieError(
            f"BatchNorm cannot train on one sample: with batch size {batch}, client {lone[0]} "
            f"({data.train.sizes[lone[0]]} samples) has a batch of one ({len(lone)} such clients); use another batch "
            "size, --drop-last (drop_last=True), or GroupNorm"
        ) from None
