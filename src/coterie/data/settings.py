"""Check the settings of partition rules and record them in the partition."""

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
            raise CoterieError(f"{name} must be at least {low}, got {value}")


def between(low: float, high: float, **settings: float) -> None:
    for name, value in settings.items():
        if not low <= value <= high:
            raise CoterieError(f"{name} must be between {low} and {high}, got {value}")


def recorded(rule: Callable[P, Partition]) -> Callable[P, Partition]:
    """Decorate a rule: record its name and all its settings, including defaults, in its partitions."""
    signature = inspect.signature(rule)

    @functools.wraps(rule)
    def call(*args: P.args, **kwargs: P.kwargs) -> Partition:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        made = rule(*args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if name != "labels"}
        return replace(made, name=rule.__name__.replace("_", "-"), settings={**given, **made.settings})

    return call
