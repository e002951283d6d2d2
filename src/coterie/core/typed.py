"""Check settings against the types and ranges that their dataclasses declare.

A field declares its range in its metadata, next to its help text: `low` and `high` are allowed values, `above` and
`below` are not. A number with a range must also be finite, unless `high` is infinity.

    lr: float = field(default=0.01, metadata={"help": "learning rate", "low": 0})
    width: float = field(default=1.0, metadata={"help": "width of the kernel", "above": 0})
"""

from __future__ import annotations

import math
import operator
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError

WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse the first value that is not of its field's type, or else the first outside of its field's range."""
    check_types(kind, values)
    for f in fields(kind):
        value = values.get(f.name)
        limits = {name: f.metadata[name] for name in LIMITS if name in f.metadata}
        if not limits or not isinstance(value, Real):
            continue
        finite = isinstance(value, Integral) or math.isfinite(value) or value == limits.get("high")
        if not finite or not all(LIMITS[name][1](value, limit) for name, limit in limits.items()):
            words = " and ".join(f"{LIMITS[name][0]} {limit}" for name, limit in limits.items()) if finite else "finite"
            raise CoterieError(f"{f.name} must be {words}, got {value}")


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse the first value that is not of its field's type. Only numbers, truth values and text are checked."""
    for name, value in values.items():
        allowed = plain_types(kind).get(name, ())
        if allowed and not any(fits(value, one) for one in allowed):
            words = " or ".join(WORDS[one] for one in allowed)
            raise CoterieError(f"{name} must be {words}, got {value!r:.60} ({type(value).__name__})")


@cache
def plain_types(kind: type) -> dict[str, tuple[type, ...]]:
    """Field -> the types it may have, where all of them are plain."""
    try:
        hints = typing.get_type_hints(kind)
    except (NameError, TypeError, AttributeError):  # annotations of a user's class that cannot be resolved
        return {}
    found = {name: typing.get_args(h) if isinstance(h, types.UnionType) else (h,) for name, h in hints.items()}
    return {name: given for name, given in found.items() if all(one in WORDS for one in given)}


def fits(value: object, kind: type) -> bool:
    if isinstance(value, bool | np.bool_):
        return kind is bool
    if kind is int:
        return isinstance(value, Integral)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    return isinstance(value, Real if kind is float else kind)
