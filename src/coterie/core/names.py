"""Names of clients and methods, as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coterie.core.errors import CoterieError, unknown


def client_number(asked: int | str, names: Sequence[str], numbers: Sequence[int]) -> int:
    """The number of the client that is asked for. Text that is exactly a name is that name, also where it has digits.

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


def listed(numbers: Sequence[int]) -> str:
    consecutive = list(numbers) == list(range(len(numbers)))
    return f"0 to {len(numbers) - 1}" if consecutive else ", ".join(map(str, numbers))


def spelling(name: str) -> str:
    """Letters and digits in lower case: what FedPAC, fed_pac and Fed-PAC have in common."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
