"""Allowed values of message fields. A method declares them in the types of the fields; every server checks them.

    class Up(NamedTuple):
        weights: Weights                                 # as every field: finite, at most `limit` in magnitude
        samples: Samples                                 # () as many as the client announced when it joined
        cluster: Annotated[Tensor, Index("clusters")]    # () from 0 to method.clusters - 1

A client whose update violates a rule is left out of the round; a warning names the field and the value.
"""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree

LIMIT = 1e9  # largest magnitude of a number in an update: its square still fits into float32, many times
ROUNDING = 0.01  # relative error of numbers that travel in a smaller type
BEYOND = "(--max-magnitude)"  # end of what is said of a number that is too large
LEAST = 1e-9  # smallest share of its samples that a client may count: more than zero, so that it can be divided by


class Known(NamedTuple):
    """What a server knows about the clients whose updates it checks."""

    method: Any  # rules may refer to its settings
    samples: Tensor  # (S,) training samples, as announced by each client when it joined
    limit: float = LIMIT


class Rule(ABC):
    """A condition on a field, or on each of its tensors."""

    @abstractmethod
    def holds(self, t: Tensor, known: Known) -> Tensor:
        """(S,) whether the rows of a tensor (S, ...) obey the rule."""

    @abstractmethod
    def fault(self, t: Tensor, known: Known) -> str:
        """Why one row (1, ...) violates the rule."""


@dataclass(frozen=True)
class Magnitude(Rule):
    """For all floating-point numbers: finite, and at most `limit` in magnitude."""

    def holds(self, t: Tensor, known: Known) -> Tensor:
        return rows(t.abs() <= known.limit)  # neither infinity nor NaN is

    def fault(self, t: Tensor, known: Known) -> str:
        if not bool(t.isfinite().all()):
            return "is not finite"
        return f"has {largest(t):g}, beyond {known.limit:g} {BEYOND}"


@dataclass(frozen=True)
class Range(Rule):
    low: float
    high: float = torch.inf

    def holds(self, t: Tensor, known: Known) -> Tensor:
        return rows((t >= self.low) & (t <= self.high))

    def fault(self, t: Tensor, known: Known) -> str:
        least, most = float(t.min()), float(t.max())
        return f"has {least:g}, below {self.low:g}" if least < self.low else f"has {most:g}, above {self.high:g}"


@dataclass(frozen=True)
class Index(Rule):
    """An integer from 0 to a setting of the method, exclusive."""

    setting: str

    def holds(self, t: Tensor, known: Known) -> Tensor:
        return rows((t >= 0) & (t < getattr(known.method, self.setting)) & (t == t.round()))

    def fault(self, t: Tensor, known: Known) -> str:
        return f"is {float(t.flatten()[0]):g}, not one of 0 to {getattr(known.method, self.setting) - 1}"


@dataclass(frozen=True)
class Share(Rule):
    """Nonnegative numbers whose sum is at most the number of samples that the client announced.

    least: the smallest share of that number that they may sum to.
    """

    least: float = LEAST

    def holds(self, t: Tensor, known: Known) -> Tensor:
        total, n = sums(t), known.samples.to(t.device, torch.float64, non_blocking=True)
        return rows(t >= 0) & (total >= self.least * n) & (total <= (1 + ROUNDING) * n)

    def fault(self, t: Tensor, known: Known) -> str:
        if float(t.min()) < 0:
            return f"has {float(t.min()):g}, below 0"
        return f"sums to {float(sums(t)):g}, and the client announced {float(known.samples):g} samples"


Samples = Annotated[Tensor, Share(1 - ROUNDING)]  # () all training samples of the client
Counted = Annotated[Tensor, Share()]  # () or (K,) samples of some kind, or of each class
Variance = Annotated[Tensor, Range(0)]
MAGNITUDE, VARIANCE = Magnitude(), Range(0)


def sound(ups: Any, known: Known) -> Tensor:
    """(S,) whether the row of each client obeys all rules. On the device of the updates, without waiting for it."""
    held = [rule.holds(t, known) for _, t, rule in ruled(ups)]
    return torch.stack(held).all(0) if held else torch.ones(len(known.samples), dtype=torch.bool)


def fault(up: Any, known: Known) -> str | None:
    """What is wrong with the update of one client, or None. Both arguments have a leading axis of 1."""
    for name, t, rule in ruled(up):
        if not bool(rule.holds(t, known)):
            return f"`{name}` {rule.fault(t, known)}"
    return None


def ruled(message: Any, prefix: str = "", own: tuple[Rule, ...] = ()) -> Iterator[tuple[str, Tensor, Rule]]:
    """Every tensor with each rule that it must obey."""
    if isinstance(message, Tensor):
        if message.numel():
            number = (MAGNITUDE,) if message.is_floating_point() else ()
            spread = (VARIANCE,) if prefix.endswith("running_var") else ()  # BatchNorm's
            for rule in (*number, *spread, *own):
                yield prefix, message, rule
    elif isinstance(message, dict):
        for name, branch in message.items():
            yield from ruled(branch, f"{prefix}.{name}" if prefix else name, own)
    elif hasattr(message, "_fields"):
        kind: Any = type(message)
        found = declared(kind)
        for name, branch in zip(message._fields, message, strict=True):
            yield from ruled(branch, f"{prefix}.{name}" if prefix else name, found.get(name, ()))


@cache
def declared(message: type) -> dict[str, tuple[Rule, ...]]:
    """Field -> the rules in its type."""
    try:
        hints = typing.get_type_hints(message, include_extras=True)
    except NameError:  # a class inside a function: its annotations cannot be resolved, so it declares nothing
        return {}
    return {name: tuple(rule for rule in said_of(hint) if isinstance(rule, Rule)) for name, hint in hints.items()}


def said_of(hint: Any) -> Iterator[Any]:
    """The metadata of `Annotated`, also inside unions."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for part in typing.get_args(hint):
            yield from said_of(part)
    else:
        yield from getattr(hint, "__metadata__", ())


def rows(held: Tensor) -> Tensor:
    """(S,) from (S, ...)."""
    return held.flatten(1).all(1) if held.ndim > 1 else held


def sums(t: Tensor) -> Tensor:
    """(S,) sums of the rows."""
    return (t.flatten(1).double().sum(1) if t.ndim > 1 else t.double()).nan_to_num(nan=-1.0)


def largest(t: Tensor) -> float:
    """The number of largest magnitude."""
    return float(t.flatten()[t.abs().argmax()])


def finite(state: Any) -> Tensor:
    """() whether every number of a tree is finite."""
    held = [t.isfinite().all() for t in tree.leaves(state) if t.is_floating_point()]
    return torch.stack([flag.to(held[0].device) for flag in held]).all() if held else torch.tensor(True)
