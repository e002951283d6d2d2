"""Errors for users: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from coterie.core.synonyms import translated


class CoterieError(Exception):
    """A user's mistake. The command line prints it as one line and exits with code 2."""


class Diverged(CoterieError):
    """Training diverged: numbers are not finite. Repeating it with these settings does not help."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory. For a CPU, torch raises a RuntimeError that only its text identifies."""
    said = ("out of memory", "DefaultCPUAllocator")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in said))


def unknown(what: str, name: str, known: Iterable[str]) -> CoterieError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = translated(name, names) or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names) or 'none'}"
    return CoterieError(f"unknown {what} '{name}': {hint}")


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Such as: a, b, c and 4 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
