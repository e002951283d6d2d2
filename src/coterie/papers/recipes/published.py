"""Published numbers of a recipe's rows."""

from __future__ import annotations

from typing import Any

from coterie.core.errors import CoterieError
from coterie.core.validation import MappingReader, fitting
from coterie.papers.recipes.recipe import Published, Value


def read_published(
    where: str, content: Any, vary: dict[str, list[Any]], measures: dict[str, str]
) -> dict[Value, dict[str, Published]]:
    """A number; or measure -> number; or, if settings vary, a list of {setting: value, measure: number}."""
    if content is None:
        return {}
    if not vary:
        return {(): read_numbers(where, content, measures)}
    found: dict[Value, dict[str, Published]] = {}
    for entry in fitting(where, content, list):
        keys = MappingReader(f"{where}: ", entry)
        value = tuple((name, keys.take(name, object)) for name in vary)
        for name, chosen in value:
            if chosen not in vary[name]:
                raise CoterieError(f"{where}: {name} {chosen} is not a value of vary: {vary[name]}")
        if value in found:
            raise CoterieError(f"{where}: duplicate entry for {describe(value)}")
        found[value] = read_numbers(where, keys.left, measures)
    return found


def read_numbers(where: str, content: Any, measures: dict[str, str]) -> dict[str, Published]:
    if not isinstance(content, dict):
        content = {next(iter(measures)): content} if len(measures) == 1 else content
    keys = MappingReader(f"{where}: ", content)
    found = {name: read_number(f"{where}: {name}", keys.take(name, object)) for name in measures if name in keys.left}
    keys.known += measures
    keys.close()
    return found


def read_number(where: str, content: Any) -> Published:
    """For example 81.13, or {mean: 81.13, std: 0.4}."""
    if isinstance(content, dict):
        keys = MappingReader(f"{where}: ", content)
        found = Published(keys.take("mean", float), keys.take("std", float, None))
        keys.close()
    else:
        found = Published(fitting(where, content, float))
    if not 0 <= found.mean <= 100:
        raise CoterieError(f"{where} is {found.mean}: accuracies are in percent, 0 to 100")
    return found


def describe(value: Value) -> str:
    return ", ".join(f"{name} {setting}" for name, setting in value)
