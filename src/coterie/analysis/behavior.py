"""What methods send and allow, found by trying them in tiny federations. behavior.json has it for the built-in ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from coterie.analysis.catalogue import CLIENTS, PRIVATE, Behavior
from coterie.analysis.contents import contents
from coterie.core import tree
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.execution import Looped, Turn
from coterie.execution.requests import send
from coterie.execution.scoring import has_global
from coterie.models import make_network
from coterie.privacy.examine import examine
from coterie.privacy.refusals import verdict


def tried(method: AnyMethod) -> Behavior:
    """Its behavior in tiny federations. Messages are those of one round without training."""
    data = sample_data()
    network = make_network("conv4", data, 0, model_args={"bn": "stats"}) if method.needs_norm else None
    brief = replace(method, train=method.train.but(local_epochs=0))
    backend = Looped(brief, network or make_network("cnn", data, 0), data, 0, processes=1)
    server = backend.method.server_init(backend.model, backend.census)
    backend.join(backend.method.server_welcome(server))
    everyone = torch.arange(CLIENTS)
    downs = send(backend.method, server, everyone)
    ups = backend.train(everyone, downs, Turn(0)).ups
    return Behavior(
        contents(method),
        protections(method),
        filled(downs),
        filled(ups),
        has_global(method, backend.model, server, data),
        tree.size(downs) // CLIENTS,
        tree.size(ups) // CLIENTS,
        tree.size(backend.model.start),
    )


def protections(method: AnyMethod) -> tuple[str, ...]:
    """The protections of PRIVATE that the method allows."""
    kinds = [kind for kind in PRIVATE if kind != "encrypt" and verdict(kind, method) is None]
    try:
        examine(method)
    except CoterieError:
        return tuple(kinds)
    return (*kinds, "encrypt")


def filled(messages: Any) -> tuple[str, ...]:
    """The fields that hold something."""
    return tuple(name for name in type(messages)._fields if tree.leaves(getattr(messages, name)))


def sample_data() -> FederatedData:
    """Images of the paper's size; only shapes matter."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (CLIENTS * 10, 1, 28, 28), generator=draw, dtype=torch.uint8)
    split = Split(x, torch.arange(10).repeat(CLIENTS), (10,) * CLIENTS)
    return FederatedData("sample", 10, split, split)
