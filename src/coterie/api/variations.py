"""Values of settings to try: read from text or lists, combined, and written as names."""

from __future__ import annotations

import itertools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.federation import Settings

Candidate = dict[str, Any]  # setting -> value
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def searchable(method: type) -> dict[str, Any]:
    """Setting -> type, of the federation, local training and the method."""
    kinds = {part: typing.get_type_hints(part) for part in (Settings, LocalTraining, method)}
    return {f.name: kinds[part][f.name] for part in kinds for f in fields(part) if f.name != "train"}


def listed_values(name: str, kind: Any, text: str) -> list[Any]:
    """The values of a text such as "0.1,1,10"."""
    simple, may_miss = plain(kind)
    if simple not in (bool, int, float, str):
        raise CoterieError(f"{name}: its values contain commas; give them in Python, as a list of values")
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise CoterieError(f"{name}={text}: a value is missing; give them as {name}=1,2,3")
    values = [None if may_miss and word == "none" else from_word(name, simple, word) for word in words]
    return from_values(name, kind, values)


def from_word(name: str, kind: type, word: str) -> Any:
    try:
        return WORDS[word.lower()] if kind is bool else kind(word)
    except (ValueError, KeyError):
        raise wrong(name, kind, word) from None


def from_values(name: str, kind: Any, values: Any) -> list[Any]:
    """Distinct values of the setting's type."""
    if not isinstance(values, Sequence) or not values:
        raise CoterieError(f"{name}: expected a list of values, got {values!r}")
    simple, may_miss = plain(kind)
    return list(dict.fromkeys(None if may_miss and v is None else of_kind(name, simple, v) for v in values))


def of_kind(name: str, kind: type, value: Any) -> Any:
    """Accepts NumPy numbers."""
    numeric = {int: Integral, float: Real}.get(kind, kind)
    if not isinstance(value, numeric) or (isinstance(value, bool) and kind is not bool):
        raise wrong(name, kind, value)
    found = kind(value)
    if kind is float and not math.isfinite(found):
        raise wrong(name, kind, value)
    return found


def plain(kind: Any) -> tuple[Any, bool]:
    """A type without None and without the types of a tuple's items, and whether it allows None."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    simple = next(option for option in options if option is not type(None))
    return typing.get_origin(simple) or simple, type(None) in options


def wrong(name: str, kind: type, value: Any) -> CoterieError:
    words = {bool: "true or false", int: "a whole number", float: "a finite number"}.get(kind, f"a {kind.__name__}")
    return CoterieError(f"{name} must be {words}, got {value!r}")


def combinations(values: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """All combinations; the last setting changes fastest."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def shown(candidate: Candidate) -> str:
    """Such as "align=0.1 lr=0.01"."""
    return " ".join(f"{name}={word(value)}" for name, value in candidate.items())


def word(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, pair)) for pair in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
