"""What every partition rule does with its settings: check them, and write them down."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec

from coterie.core.errors import CoterieError
from coterie.data.partition import Partition

P = ParamSpec("P")


def at_least(low: float, **settings: float) -> None:
    for name, value in settings.items():
        if not value >= low:
            raise CoterieError(f"{name} is {value}: it must be at least {low}")


def between(low: float, high: float, **settings: float) -> None:
    for name, value in settings.items():
        if not low <= value <= high:
            raise CoterieError(f"{name} is {value}: it must be between {low} and {high}")


def recorded(rule: Callable[P, Partition]) -> Callable[P, Partition]:
    """The rule, with its name and all its settings, defaults too, written into the partition it makes."""
    signature = inspect.signature(rule)

    @functools.wraps(rule)
    def call(*args: P.args, **kwargs: P.kwargs) -> Partition:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        made = rule(*args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if name != "labels"}
        return replace(made, name=rule.__name__.replace("_", "-"), settings={**given, **made.settings})

    return call
