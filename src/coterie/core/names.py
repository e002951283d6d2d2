"""Names of clients, methods and parts of networks, as users write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from coterie.core.errors import CoterieError, some_of, unknown

LISTED = 8  # names in a message, at most


def client_number(asked: int | str, names: Sequence[str], numbers: Sequence[int]) -> int:
    """The number of the requested client. Text that equals a name is that name, even if it consists of digits.

    names: one for each of `numbers`, or empty.
    """
    if isinstance(asked, str):
        found = [number for number, name in zip(numbers, names, strict=False) if name == asked]
        if len(found) > 1:
            raise CoterieError(f"clients {', '.join(map(str, found))} are all named '{asked}'; give the number")
        if found:
            return found[0]
        if not re.fullmatch(r"-?[0-9]+", asked):
            if names:
                raise unknown("client", asked, names)
            raise CoterieError(f"unknown client '{asked}': these clients have no names; clients are {listed(numbers)}")
        asked = int(asked)
    if asked not in numbers:
        raise CoterieError(f"there is no client {asked}; clients are {listed(numbers)}")
    return int(asked)


def client_name(number: int, names: Sequence[str], numbers: Sequence[int]) -> str:
    """The client's name, or its number where clients have no names."""
    return names[list(numbers).index(number)] if names else str(number)


def separated(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def listed(numbers: Sequence[int]) -> str:
    consecutive = list(numbers) == list(range(len(numbers)))
    return f"0 to {len(numbers) - 1}" if consecutive else ", ".join(map(str, numbers))


def spelling(name: str) -> str:
    """Letters and digits in lower case: what FedPAC, fed_pac and Fed-PAC have in common."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def matching(what: str, pattern: str, names: Sequence[str]) -> frozenset[str]:
    """The dotted names that a pattern selects: names, or the modules that contain them, with `*`, separated by `|`.

    Raises an error for a part of the pattern that selects nothing.
    """
    found: set[str] = set()
    for part in pattern.split("|"):
        chosen = {name for name in names if fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")}
        if not chosen:
            known = sorted({*names, *(name.rpartition(".")[0] for name in names)} - {""})
            near = difflib.get_close_matches(part, known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {some_of(known, LISTED)}"
            raise CoterieError(f"unknown {what} '{part}': {hint}")
        found |= chosen
    return frozenset(found)
