"""What travels in a method's messages: whole models, parts of them, prototypes. Found in a tiny federation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model, Weights
from coterie.privacy.examine import tiny_model, tiny_samples

CONTENTS = {
    "whole model": "all weights of the network",
    "several models": "whole models of other clients, of clusters or of components",
    "encoder": "the layers up to the features",
    "head": "the last layer",
    "some layers": "weights of the encoder and of the head, but not all",
    "other networks": "weights that are not those of the network, such as a policy or a generator",
    "prototypes": "one vector or Gaussian of features per class",
    "statistics": "other values per class or feature, such as class counts",
    "nothing": "no message",
}


def contents(method: AnyMethod) -> tuple[str, ...]:
    """What a client receives and sends, in the words and the order of CONTENTS; single numbers are left out."""
    model, samples = tiny_model(True), tiny_samples()
    counts = torch.stack([data.counts.long() for data in samples])
    server = method.server_init(model, Census(counts.sum(1), counts))
    down = method.server_send(server, torch.tensor(0))
    state = method.client_init(model, samples[0], method.server_welcome(server))
    _, up = method.client_train(model, state, down, samples[0])
    found = {word for message in (down, up) for value in message for word in words(value, model)}
    return tuple(word for word in CONTENTS if word in (found or {"nothing"}))


def words(value: Any, model: Model) -> Iterator[str]:
    if isinstance(value, Tensor):
        if value.ndim:
            yield "prototypes" if value.shape[0] == model.classes and value.ndim == 2 else "statistics"
    elif isinstance(value, dict | Weights):
        if value and tree.leaves(value):
            yield part(value, model)
    else:  # a message within the message
        for inner in value:
            yield from words(inner, model)


def part(value: Any, model: Model) -> str:
    """Which weights of the network these are. BatchNorm's statistics do not count."""
    found, whole = shapes(value), shapes(model.start)
    known = {"whole model": whole, "encoder": shapes(model.start.encoder), "head": shapes(model.start.head)}
    for word, names in known.items():
        if found in (names, {f"{word}.{name}": shape for name, shape in names.items()}):
            return word
    if found.keys() == whole.keys() and all(found[name][1:] == shape for name, shape in whole.items()):
        return "several models"
    return "some layers" if found.items() <= whole.items() else "other networks"


def shapes(value: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tree.trained(value).items()}
