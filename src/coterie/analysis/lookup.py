"""Find methods by name, and describe them."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from coterie.core.errors import CoterieError, unknown
from coterie.core.importing import imported
from coterie.core.method import AnyMethod, Method
from coterie.core.names import spelling
from coterie.methods import METHODS, VARIANTS

RESULT_POINTS = {"pre", "post", "finished", "global"}  # see core/method.py


def method_name(name: str) -> str:
    """Normalize the name of a method or variant (FedPAC, fed_pac, Fed-RoD). Import paths are returned unchanged."""

    if ":" in name:
        method_class(name)
        return name
    known = {spelling(word): word for word in (*METHODS, *VARIANTS)}
    if spelling(name) not in known:
        raise unknown("method", name, known.values())
    return known[spelling(name)]


def method_class(name: str) -> type[AnyMethod]:
    """The class of a method or variant, or of a user's method by its import path package.module:Class."""
    base, _ = parts(name)
    if base in METHODS:
        return METHODS[base]
    if ":" not in name:
        raise unknown("method", name, (*METHODS, *VARIANTS))
    return checked_class(name, imported("method", name))


def checked_class(name: str, found: Any) -> type[AnyMethod]:
    """Raise an error unless this is the class of a complete method."""
    if not isinstance(found, type) or not issubclass(found, Method):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise CoterieError(f"method '{name}' is {kind}, not a subclass of coterie.core.method.Method")
    missing = sorted(found.__abstractmethods__)
    missing += [name for name in ("title", "results") if not hasattr(found, name)]
    if missing:
        raise CoterieError(f"method '{name}' does not define {', '.join(missing)}")
    if found.title not in found.results:
        raise CoterieError(
            f"method '{name}': its `results` {sorted(found.results)} do not name its title, {found.title}"
        )
    wrong = sorted(set(found.results.values()) - RESULT_POINTS)
    if wrong:
        raise CoterieError(
            f"method '{name}': its `results` are measured at {', '.join(wrong)}; "
            f"known: {', '.join(sorted(RESULT_POINTS))}"
        )
    return found


def identifier(method: AnyMethod | type[AnyMethod]) -> str:
    """The id of a method in a run folder: its name, or the import path of a user's method."""
    kind = method if inspect.isclass(method) else type(method)
    named = next((name for name, ours in METHODS.items() if ours is kind), None)
    return named or f"{kind.__module__}:{kind.__qualname__}"


def described(method: AnyMethod) -> dict[str, Any]:
    """A method for config.json: its title, its class and all its settings."""
    return {"name": method.title, "class": identifier(method), **asdict(method)}


def ancestor(method: AnyMethod) -> str | None:
    """The name of the built-in method that this one is or derives from; None if there is none."""
    names = {kind: name for name, kind in METHODS.items()}
    return next((names[kind] for kind in type(method).__mro__ if kind in names), None)


def parts(name: str) -> tuple[str, dict[str, Any]]:
    """The base method of a method or variant, and the settings of the variant."""
    base, changes, _ = VARIANTS.get(name, (name, {}, ""))
    return base, changes


def training(name: str) -> str:
    """The method or variant whose training this result comes from; one training can give several results."""
    base, changes = parts(name)
    return name if changes else base
