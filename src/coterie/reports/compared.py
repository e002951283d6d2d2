"""What the command of a run says of the comparison that the run is of, if it is of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.api import method_name
from coterie.comparison import reported
from coterie.core.errors import CoterieError
from coterie.methods import training


def place(command: Mapping[str, Any]) -> int:
    """How many methods were named before that of this run."""
    trained = [training(name) for name in compared(command)]
    return trained.index(command["method"]) if command.get("method") in trained else 0


def reference(command: Mapping[str, Any]) -> str:
    """What of this run the others were tested against; empty if nothing."""
    methods = compared(command)
    against = known(command["against"]) if "against" in command else "".join(methods[-1:])
    return reported(against) if against and training(against) == command.get("method") else ""


def compared(command: Mapping[str, Any]) -> list[str]:
    """The methods that were named; none if the run is of no comparison."""
    methods = command.get("methods")
    return [name for name in map(known, methods) if name] if isinstance(methods, list) else []


def known(name: Any) -> str:
    try:
        return method_name(str(name))
    except CoterieError:  # a method of another version
        return ""
