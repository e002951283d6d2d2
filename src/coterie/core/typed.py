"""Settings have the types that their dataclasses declare: 1.5 rounds, or a rate given as text, are refused."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError

WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}


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
