"""The catalogue of methods, from their code: messages, state, traffic, papers."""

from __future__ import annotations

import sys
import typing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from coterie.core import tree
from coterie.core.data import FederatedData, Split
from coterie.core.method import AnyMethod
from coterie.execution import Looped, Turn
from coterie.execution.requests import send
from coterie.execution.scoring import has_global
from coterie.federation.history import POINTS
from coterie.methods import METHODS, VARIANTS
from coterie.models import make_network

CLIENTS = 20


class MethodEntry(NamedTuple):
    name: str
    title: str
    about: str  # the first sentence of its file
    paper: str
    down: tuple[str, ...]  # fields that are sent to a client
    up: tuple[str, ...]
    stays: tuple[str, ...]  # fields of a client's state
    results: dict[str, str]  # what is reported -> where it is measured
    has_global: bool
    bytes_down: int  # of one client in one round
    bytes_up: int
    variants: dict[str, str]  # other names of the command line -> title


def entries() -> list[MethodEntry]:
    return [entry(name, kind()) for name, kind in METHODS.items()]


def entry(name: str, method: AnyMethod) -> MethodEntry:
    data = sample_data()
    backend = Looped(
        replace(method, train=method.train.but(local_epochs=0)), make_network("cnn", data, 0), data, 0, processes=1
    )
    server = backend.method.server_init(backend.model, backend.census)
    backend.join(backend.method.server_welcome(server))
    everyone = torch.arange(CLIENTS)
    downs = send(backend.method, server, everyone)
    ups = backend.train(everyone, downs, Turn(0)).ups
    about, paper, *_ = (
        " ".join(part.split()) for part in (sys.modules[type(method).__module__].__doc__ or "").split("\n\n")
    )
    return MethodEntry(
        name,
        method.title,
        about,
        paper,
        fields_of(method, "server_send"),
        tuple(n for n in type(ups)._fields if tree.leaves(getattr(ups, n))),
        tuple(n for n in fields_of(method, "client_init") if "momentum" not in n),
        dict(method.results),
        has_global(method, backend.model, server, data),
        tree.size(downs) // CLIENTS,
        tree.size(ups) // CLIENTS,
        {variant: title for variant, (base, _, title) in VARIANTS.items() if base == name},
    )


def fields_of(method: AnyMethod, function: str) -> tuple[str, ...]:
    message: Any = typing.get_type_hints(getattr(type(method), function))["return"]
    return tuple(message._fields)


def sample_data() -> FederatedData:
    """Images of the paper's size; only shapes matter."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (CLIENTS * 10, 1, 28, 28), generator=draw, dtype=torch.uint8)
    split = Split(x, torch.arange(10).repeat(CLIENTS), (10,) * CLIENTS)
    return FederatedData("sample", 10, split, split)


def markdown() -> str:
    """docs/methods.md."""
    lines = [
        "# Methods",
        "",
        "This page is made from the code (`coterie methods --markdown`). Bytes are those of one client in one round,",
        f"for the network that FedPAC uses on Fashion-MNIST (117,066 parameters) and {CLIENTS} clients. Momentum, if",
        "it stays on a client between rounds, is not listed. *Measured*: where the number that is reported is taken.",
        "",
        "| method | what it does | down | up | stays on the client | measured | global model | bytes down | bytes up |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    listed = entries()
    lines += [
        f"| `{e.name}` {e.title} | {e.about} | {words(e.down)} | {words(e.up)} | {words(e.stays)} "
        f"| {', '.join(f'{name}: {point}' for name, point in e.results.items())} "
        f"| {'yes' if e.has_global else 'no'} | {e.bytes_down:,} | {e.bytes_up:,} |"
        for e in listed
    ]
    lines += ["", "Where results are measured:", ""]
    lines += [f"- `{point}`: {meaning}" for point, meaning in POINTS.items()]
    lines += ["", "## Variants", "", "Settings that the papers give a name.", "", "| name | title |", "|---|---|"]
    lines += [f"| `{name}` | {title} |" for e in listed for name, title in e.variants.items()]
    lines += ["", "## Papers", ""]
    lines += [f"- **{e.title}**. {e.paper}" for e in listed]
    return "\n".join(lines) + "\n"


def words(fields: tuple[str, ...]) -> str:
    return ", ".join(name.replace("_", " ") for name in fields) or "nothing"
