"""Requests and answers, and the version of a client's state.

The server sends requests (join, train, score, score_global, finish) and a client answers each one. The state of a
client has a version: the checksum of all requests that led to it. A request names the version it starts from and the
version it produces, so duplicated, late or repeated requests need no special case.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from torch import Tensor

from coterie.core import tree
from coterie.core.method import AnyMethod
from coterie.core.wrapper import Around
from coterie.deploy.wire import Header, InvalidAnswer, body, checksum, text

STATE_LOST = "its stored state is missing"  # the note of an error: the client has to join again
SECRETS = ("seed", "keys")  # fields of wrappers that only one side knows


class Message(NamedTuple):
    """A request to one client, encoded."""

    own: bytes  # the part for this client only
    shared: bytes  # the part that is the same for all clients
    header: Header


class Received(NamedTuple):
    """A validated request or answer."""

    header: Header
    tensors: tree.Tree


def version(header: Header, own: bytes) -> str:
    """The version of a client's state after this request; for a request that changes no state, the request's id."""
    return checksum(*map(text, header._replace(made="")), body(own))


def check_scores(split: str, scores: Tensor) -> None:
    """Validate the number of correct samples, the number of samples, and their mean loss."""
    correct, total, loss = scores.tolist()
    if not 0 <= correct <= total < math.inf:
        raise InvalidAnswer(f"impossible scores on {split}: {correct:g} correct of {total:g}")
    if not 0 <= loss < math.inf:
        raise InvalidAnswer(f"the loss on {split} must be finite and at least 0, got {loss:g}")


def settings(method: AnyMethod) -> dict[str, Any]:
    """The settings of a method and of the methods it wraps, without secrets."""
    plain = {f.name: getattr(method, f.name) for f in fields(method) if f.name not in SECRETS}
    found: dict[str, Any] = {n: v for n, v in plain.items() if isinstance(v, int | float | str | tuple | None)}
    found |= {"kind": f"{type(method).__module__}:{type(method).__qualname__}", "train": asdict(method.train)}
    return found | {"inner": settings(method.inner)} if isinstance(method, Around) else found
