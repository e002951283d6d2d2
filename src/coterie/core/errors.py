"""Errors that speak to the user: what was wrong, where, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CoterieError(Exception):
    """A mistake in what was asked or given. The command line prints it in one line and exits with 2."""


class Diverged(CoterieError):
    """Training came to numbers that are not finite: with these settings it always will."""


def out_of_memory(error: BaseException) -> bool:
    """Whether there was too little of it. torch has an error of its own for a GPU, and only words for a CPU."""
    said = ("out of memory", "DefaultCPUAllocator")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in said))


def unknown(what: str, name: str, known: Iterable[str]) -> CoterieError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names) or 'none'}"
    return CoterieError(f"unknown {what} '{name}': {hint}")
