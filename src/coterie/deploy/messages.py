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
from coterie.core.metric_scale import MetricScale
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


def check_scores(split: str, scores: Tensor, metric: MetricScale) -> None:
    """Validate the value of the metric times the number of samples, this number, and the mean loss."""
    weighted, total, loss = scores.tolist()
    if metric.counts and not 0 <= weighted <= total < math.inf:
        raise InvalidAnswer(f"impossible scores on {split}: {weighted:g} correct of {total:g}")
    if not metric.counts and not (0 <= total < math.inf and possible(weighted, total, metric)):
        raise InvalidAnswer(f"impossible scores on {split}: {metric.words} times samples {weighted:g}, of {total:g}")
    if not math.isfinite(loss) or (metric.counts and loss < 0):
        raise InvalidAnswer(f"the loss on {split} must be finite{' and at least 0' * metric.counts}, got {loss:g}")


def possible(weighted: float, total: float, metric: MetricScale) -> bool:
    """Whether a metric can have this value; NaN: it is undefined for these samples."""
    if math.isnan(weighted):
        return total > 0
    return math.isfinite(weighted) and (not metric.share or 0 <= weighted <= total * (1 + 1e-9))


def settings(method: AnyMethod) -> dict[str, Any]:
    """The settings of a method and of the methods it wraps, without secrets."""
    plain = {f.name: getattr(method, f.name) for f in fields(method) if f.name not in SECRETS}
    found: dict[str, Any] = {n: v for n, v in plain.items() if isinstance(v, int | float | str | tuple | None)}
    found |= {"kind": f"{type(method).__module__}:{type(method).__qualname__}", "train": asdict(method.train)}
    return found | {"inner": settings(method.inner)} if isinstance(method, Around) else found
