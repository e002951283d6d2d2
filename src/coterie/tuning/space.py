"""The search space, and the candidates of grid and random searches."""

from __future__ import annotations

import itertools
import json
import math
import random
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError, unknown
from coterie.core.training import LocalTraining
from coterie.federation import Settings

Candidate = dict[str, Any]  # setting -> value
SEARCHES = ("grid", "random", "halving", "tpe", "asha")
ADAPTIVE = ("tpe", "asha")  # candidates depend on the scores of those before
TRIALS = 16  # default number of random candidates
DIGITS = 4  # significant digits of random numbers, so that the number shown is the one tried
NOT_SEARCHED = {
    "rounds": "set the rounds of a full training with --rounds",
    "seed": "the best seed is luck; --seeds takes the mean over several",
    "evaluate_every": "it does not change training",
    "new_clients": "it changes the clients that are measured",
}
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Span(NamedTuple):
    """A closed range: uniform over whole numbers, log-uniform otherwise."""

    low: float
    high: float
    whole: bool

    def draw(self, share: float) -> float:
        """share: in [0, 1)."""
        if self.whole:
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        return self.rounded(self.low * (self.high / self.low) ** share)

    def rounded(self, drawn: float) -> float:
        """Round to DIGITS, within the range."""
        return int(drawn) if self.whole else min(max(float(f"{drawn:.{DIGITS}g}"), self.low), self.high)


Space = dict[str, list[Any] | Span]


def searchable(method: type) -> dict[str, Any]:
    """Setting -> type, of the federation, local training and the method."""
    kinds = {part: typing.get_type_hints(part) for part in (Settings, LocalTraining, method)}
    return {f.name: kinds[part][f.name] for part in kinds for f in fields(part) if f.name != "train"}


def read_space(title: str, method: type, over: Mapping[str, Any]) -> Space:
    """over: setting -> its values, or text such as "0.1,1,10" or "0.001..0.1"."""
    if not over:
        raise CoterieError("nothing to search: name settings and their values, such as --over lr=0.01,0.1")
    known = searchable(method)
    space: Space = {}
    for given, values in over.items():
        name = given.replace("-", "_")
        if name not in known:
            raise unknown(f"setting of {title}", name, (k for k in known if k not in NOT_SEARCHED))
        kind = known[name]
        if name in NOT_SEARCHED:
            raise CoterieError(f"{name} cannot be searched: {NOT_SEARCHED[name]}")
        if name in space:
            raise CoterieError(f"{name} is named twice; give all its values at once, such as {name}=1,2,3")
        space[name] = from_text(name, kind, values) if isinstance(values, str) else from_values(name, kind, values)
    return space


def from_text(name: str, kind: Any, text: str) -> list[Any] | Span:
    simple, may_miss = plain(kind)
    if ".." in text:
        return span(name, simple, text)
    if simple not in (bool, int, float, str):
        raise CoterieError(f"{name}: its values contain commas; search it in Python, with a list of values")
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


def span(name: str, kind: type, text: str) -> Span:
    if kind not in (int, float):
        raise CoterieError(f"{name}={text}: only numbers have a range; list the values, such as {name}=a,b")
    words = text.split("..", 1)
    low, high = (of_kind(name, kind, from_word(name, kind, word.strip())) for word in words)
    if low >= high:
        raise CoterieError(f"{name}={text}: the first number of a range must be the smaller one")
    if kind is float and low <= 0:
        raise CoterieError(f"{name}={text}: a range is log-uniform, so it must start above 0")
    return Span(low, high, whole=kind is int)


def plain(kind: Any) -> tuple[Any, bool]:
    """A type without None and without the types of a tuple's items, and whether it allows None."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    simple = next(option for option in options if option is not type(None))
    return typing.get_origin(simple) or simple, type(None) in options


def wrong(name: str, kind: type, value: Any) -> CoterieError:
    words = {bool: "true or false", int: "a whole number", float: "a finite number"}.get(kind, f"a {kind.__name__}")
    return CoterieError(f"{name} must be {words}, got {value!r}")


def candidates(space: Space, search: str, trials: int | None, seed: int) -> list[Candidate]:
    """All combinations for a grid; random ones for a random search, or for halving with ranges or a given `trials`."""
    ranges = [name for name, values in space.items() if isinstance(values, Span)]
    if search == "grid" and ranges:
        raise CoterieError(f"{ranges[0]} is a range; list its values for a grid, or use --search random")
    if search == "grid" and trials is not None:
        raise CoterieError("a grid tries all combinations; --trials is for the other searches")
    if search == "random" or ranges or trials is not None:
        return draws(space, trials or TRIALS, seed)
    return grid(space)


def check_search(search: str, trials: int | None) -> None:
    if search not in SEARCHES:
        raise unknown("search", search, SEARCHES)
    if trials is not None and trials < 1:
        raise CoterieError(f"trials must be at least 1, got {trials}")


def corners(space: Space) -> list[Candidate]:
    """Candidates to check a space with: the ends of all ranges, and each listed value."""
    ends = {name: [v.low, v.high] if isinstance(v, Span) else v for name, v in space.items()}
    first = {name: values[0] for name, values in ends.items()}
    return [{**first, name: value} for name, values in ends.items() for value in values]


def grid(space: Space) -> list[Candidate]:
    """All combinations; the last setting changes fastest."""
    lists = (values for values in space.values() if not isinstance(values, Span))
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def draws(space: Space, trials: int, seed: int) -> list[Candidate]:
    """Distinct candidates; fewer than `trials` if the space is smaller."""
    numbers, found = random.Random(seed), dict[str, Candidate]()  # noqa: S311 - a search is repeatable, not secret
    for _ in range(100 * trials):
        drawn = {name: one(values, numbers.random()) for name, values in space.items()}
        found.setdefault(json.dumps(drawn), drawn)
        if len(found) == trials:
            break
    return list(found.values())


def one(values: list[Any] | Span, share: float) -> Any:
    return values.draw(share) if isinstance(values, Span) else values[int(share * len(values))]


def shown(candidate: Candidate) -> str:
    """Such as "align=0.1 lr=0.01"."""
    return " ".join(f"{name}={word(value)}" for name, value in candidate.items())


def word(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, pair)) for pair in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
