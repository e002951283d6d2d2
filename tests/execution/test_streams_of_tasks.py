"""Parallel streams give the numbers of a loop for tasks other than classification, and for texts with padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.core.data import FederatedData, Split, Transform
from coterie.core.model import Model, make_model
from coterie.models import build
from tests import toy

METHODS = ["fedavg", "fedrep", "ditto", "scaffold", "apfl"]


def padded_texts(name: str) -> tuple[FederatedData, Model]:
    """The toy's clients and classes, with texts of one to seven words; 0 is padding."""
    data = toy.toy(augmented=False)

    def of(split: Split, seed: int) -> Split:
        draw = torch.Generator().manual_seed(seed)
        words = torch.randint(1, 9, (len(split.y), 7), generator=draw)
        lengths = torch.randint(1, 8, (len(split.y), 1), generator=draw)
        return replace(split, x=torch.where(torch.arange(7) < lengths, words, 0))

    made = replace(data, train=of(data.train, 1), test=of(data.test, 2), transform=Transform(padding=0))
    args = {"hidden": 8} if name == "lstm" else {"depth": 1}
    network = build(name, (7,), data.classes, 0, vocabulary=9, padding=0, **args)
    model = make_model(network, (7,), data.task, made.transform, sample_type=torch.int64)
    return made, model.to("cpu", torch.float64)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["regression", "next-token"])
@pytest.mark.parametrize("name", METHODS)
def test_other_tasks(name: str, kind: str) -> None:
    (data, model), method = toy.of_task(kind), toy.method(name)
    assert toy.distance(toy.looped(method, model, data)[0], toy.streams(method, model, data)[0]) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("network", ["lstm", "transformer"])
def test_texts_with_padding(network: str) -> None:
    (data, model), method = padded_texts(network), toy.method("fedper")
    expected = toy.looped(method, model, data, rounds=2)[0]
    recorded = network != "lstm"  # by CUDA only
    assert toy.distance(expected, toy.streams(method, model, data, recorded=recorded, rounds=2)[0]) < 1e-10
    if network == "transformer":  # vmap has no rule for LSTMs
        assert toy.distance(expected, toy.stacked(method, model, data, rounds=2)[0]) < 1e-10
