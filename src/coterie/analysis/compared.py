"""The place of a run in its comparison, from the command that began it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.analysis.outcomes import reported
from coterie.core.errors import CoterieError
from coterie.methods import method_name, training


def place(command: Mapping[str, Any]) -> int:
    """Number of methods that were named before that of this run."""
    trained = [training(name) for name in compared(command)]
    return trained.index(command["method"]) if command.get("method") in trained else 0


def reference(command: Mapping[str, Any]) -> str:
    """The outcome of this run that the others were tested against; empty if none."""
    methods = compared(command)
    against = known(command["against"]) if "against" in command else "".join(methods[-1:])
    return reported(against) if against and training(against) == command.get("method") else ""


def compared(command: Mapping[str, Any]) -> list[str]:
    """The methods that were named; none if the run is not part of a comparison."""
    methods = command.get("methods")
    return [name for name in map(known, methods) if name] if isinstance(methods, list) else []


def known(name: Any) -> str:
    try:
        return method_name(str(name))
    except CoterieError:  # a method of another version
        return ""
