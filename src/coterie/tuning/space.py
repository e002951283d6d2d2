"""The search space, and the candidates of grid and random searches."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from coterie.api.variations import (
    Candidate,
    combinations,
    from_values,
    from_word,
    listed_values,
    of_kind,
    plain,
    searchable,
)
from coterie.core.errors import CoterieError, unknown

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
    return span(name, plain(kind)[0], text) if ".." in text else listed_values(name, kind, text)


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


def candidates(space: Space, search: str, trials: int | None, seed: int) -> list[Candidate]:
    """All combinations for a grid; random ones for a random search, or for halving with ranges or a given `trials`."""
    ranges = [name for name, values in space.items() if isinstance(values, Span)]
    if search == "grid" and ranges:
        raise CoterieError(f"{ranges[0]} is a range; list its values for a grid, or use --search random")
    if search == "grid" and trials is not None:
        raise CoterieError("a grid tries all combinations; --trials is for the other searches")
    if search == "random" or ranges or trials is not None:
        return draws(space, trials or TRIALS, seed)
    return combinations({name: values for name, values in space.items() if not isinstance(values, Span)})


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
