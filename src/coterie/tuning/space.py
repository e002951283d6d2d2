"""What may be searched, and the candidates: settings by name, each checked before anything is trained."""

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
from coterie.core.local import Sgd
from coterie.federation import Settings

Candidate = dict[str, Any]  # setting -> value
SEARCHES = ("grid", "random", "halving")
TRIALS = 16  # of a random search, where no number is given
DIGITS = 4  # significant ones of a number that is drawn: what is shown is what was tried
NOT_SEARCHED = {
    "rounds": "give the rounds of a full training by themselves",
    "seed": "the best seed is only luck; --seeds takes the mean over several",
    "evaluate_every": "it changes nothing that is learned",
    "new_clients": "it changes who is measured",
}
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Span(NamedTuple):
    """From low to high, both among it: whole numbers evenly, others evenly in their logarithm."""

    low: float
    high: float
    whole: bool

    def draw(self, share: float) -> float:
        """share: in 0..1, 1 excluded."""
        if self.whole:
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        drawn = self.low * (self.high / self.low) ** share
        return min(max(float(f"{drawn:.{DIGITS}g}"), self.low), self.high)


Space = dict[str, list[Any] | Span]


def searchable(method: type) -> dict[str, tuple[str, Any]]:
    """Name, that of the setting or of its flag -> setting and type: of the method, local training, the federation."""
    found = {}
    for part in (Settings, Sgd, method):
        kinds = typing.get_type_hints(part)
        for field in fields(part):
            if field.name != "train":
                flag = field.metadata.get("flags", (field.name,))[0].replace("-", "_")
                found[flag] = found[field.name] = (field.name, kinds[field.name])
    return found


def read_space(title: str, method: type, over: Mapping[str, Any]) -> Space:
    """over: setting -> its values, or text such as "0.1,1,10" or "0.001..0.1"."""
    if not over:
        raise CoterieError("nothing to search: name settings and their values, such as --over lr=0.01,0.1")
    known = searchable(method)
    space: Space = {}
    for given, values in over.items():
        asked = given.replace("-", "_")
        if asked not in known:
            raise unknown(f"setting of {title}", asked, (k for k in known if k not in NOT_SEARCHED))
        name, kind = known[asked]
        if name in NOT_SEARCHED:
            raise CoterieError(f"{name} is not searched: {NOT_SEARCHED[name]}")
        if name in space:
            raise CoterieError(f"{name} is named twice; give all its values at once, such as {name}=1,2,3")
        space[name] = from_text(name, kind, values) if isinstance(values, str) else from_values(name, kind, values)
    return space


def from_text(name: str, kind: Any, text: str) -> list[Any] | Span:
    simple, may_miss = plain(kind)
    if ".." in text:
        return span(name, simple, text)
    if simple not in (bool, int, float, str):
        raise CoterieError(f"{name}: its values have commas in them; search it in Python, with a list of values")
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
    """Each once, and of the type that the setting has."""
    if not isinstance(values, Sequence) or not values:
        raise CoterieError(f"{name}: give a list of values to try, not {values!r}")
    simple, may_miss = plain(kind)
    return list(dict.fromkeys(None if may_miss and v is None else of_kind(name, simple, v) for v in values))


def of_kind(name: str, kind: type, value: Any) -> Any:
    """Numbers may be NumPy's."""
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
        raise CoterieError(f"{name}={text}: a range goes from the smaller number to the larger")
    if kind is float and low <= 0:
        raise CoterieError(f"{name}={text}: a range is drawn evenly in its logarithm, so it begins above 0")
    return Span(low, high, whole=kind is int)


def plain(kind: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one; a tuple of anything is a tuple."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    simple = next(option for option in options if option is not type(None))
    return typing.get_origin(simple) or simple, type(None) in options


def wrong(name: str, kind: type, value: Any) -> CoterieError:
    said = {bool: "true or false", int: "a whole number", float: "a finite number"}.get(kind, f"a {kind.__name__}")
    return CoterieError(f"{name} is {said}, not {value!r}")


def candidates(space: Space, search: str, trials: int | None, seed: int) -> list[Candidate]:
    """Of a grid all; of a random search, or where a number of trials or a range is given, drawn ones."""
    if search not in SEARCHES:
        raise unknown("search", search, SEARCHES)
    if trials is not None and trials < 1:
        raise CoterieError(f"trials must be at least 1, not {trials}")
    ranges = [name for name, values in space.items() if isinstance(values, Span)]
    if search == "grid" and ranges:
        raise CoterieError(f"{ranges[0]} is a range, and a grid needs values; list them, or use --search random")
    if search == "grid" and trials is not None:
        raise CoterieError("a grid tries all combinations; trials are for --search random or halving")
    if search == "random" or ranges or trials is not None:
        return draws(space, trials or TRIALS, seed)
    return grid(space)


def grid(space: Space) -> list[Candidate]:
    """All combinations; the last setting changes fastest."""
    lists = (values for values in space.values() if not isinstance(values, Span))
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def draws(space: Space, trials: int, seed: int) -> list[Candidate]:
    """Different ones; fewer than `trials` if there are not so many."""
    numbers, found = random.Random(seed), dict[str, Candidate]()
    for _ in range(100 * trials):
        drawn = {name: one(values, numbers.random()) for name, values in space.items()}
        found.setdefault(json.dumps(drawn), drawn)
        if len(found) == trials:
            break
    return list(found.values())


def one(values: list[Any] | Span, share: float) -> Any:
    return values.draw(share) if isinstance(values, Span) else values[int(share * len(values))]


def shown(candidate: Candidate) -> str:
    """Such as «align=0.1 lr=0.01»."""
    return " ".join(f"{name}={word(value)}" for name, value in candidate.items())


def word(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, pair)) for pair in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
