"""The methods that are compared: which trainings they need, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.lookup import method_class, method_name, parts, training
from coterie.analysis.outcomes import label, title
from coterie.api.methods import make_method
from coterie.api.protocols import method_preset
from coterie.api.settings import names
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.methods import METHODS
from coterie.privacy import Protection

ALL = "all"  # stands for every method


class Entrant(NamedTuple):
    """A method of a comparison."""

    name: str  # of its folders
    method: str | AnyMethod
    called: str | None = None  # its name in tables; None: as the method reports
    optional: bool = False  # one of `all`: left out with the reason if it refuses the data or the network

    @property
    def title(self) -> str:
        return self.called or (title(self.method) if isinstance(self.method, str) else self.method.title)


def entrants(methods: Sequence[str | AnyMethod] | Mapping[str, str | AnyMethod]) -> list[Entrant]:
    """The methods as they were given. Wrong names are errors."""
    if isinstance(methods, str) or not methods:
        raise CoterieError("methods must be a list of at least one method, such as ['fedavg', 'fedpac']")
    if isinstance(methods, Mapping):
        return [Entrant(called, canonical(method), called) for called, method in methods.items()]
    if ALL in methods:
        if len(methods) > 1:
            raise CoterieError("'all' names every method, so it cannot be combined with others")
        names = [name for name in METHODS if name != "fedavg"]
        return [Entrant(name, name, optional=True) for name in (*names, "fedavg")]  # others are tested against the last
    found = [canonical(method) for method in methods]
    return [Entrant(method if isinstance(method, str) else method.title, method) for method in found]


def canonical(method: str | AnyMethod) -> str | AnyMethod:
    return method_name(method) if isinstance(method, str) else method


def trainings(listed: Sequence[Entrant]) -> list[Entrant]:
    """The runs that these methods need: one training can report several of them."""
    found: dict[str, Entrant] = {}
    for entrant in listed:
        if isinstance(entrant.method, str) and entrant.called is None:
            entrant = Entrant(training(entrant.method), training(entrant.method), None, entrant.optional)
        if found.setdefault(entrant.name, entrant) != entrant:
            raise CoterieError(
                f"two methods are called {entrant.title}: give them names, such as compare({{'A': ..., 'B': ...}})"
            )
    check_labels(list(found.values()))
    return list(found.values())


def check_labels(taken: Sequence[Entrant]) -> None:
    """Refuse methods that report under one name: tables would merge their runs."""
    owners: dict[str, str] = {}
    for entrant in taken:
        method = entrant.method
        for result in (method_class(parts(method)[0]) if isinstance(method, str) else method).results:
            shown = label(method, result, entrant.called)
            if shown in owners:
                raise CoterieError(
                    f"{owners[shown]} and {entrant.name} both report their results as '{shown}'; give one of the "
                    "classes another `title` (and `results`)"
                )
            owners[shown] = entrant.name


def reference_of(listed: Sequence[Entrant], against: str | None) -> str:
    """The title of the method that the others are tested against; default: the last one."""
    titles = [entrant.title for entrant in listed]
    if against is None or against in titles:
        return against or titles[-1]
    name = method_name(against)
    if training(name) not in {entrant.name for entrant in trainings(listed)}:
        raise CoterieError(f"{against} is not among the methods that are compared: choose one of {', '.join(titles)}")
    return title(name)


def check_protection(taken: Sequence[Entrant], protocol: str, settings: Mapping[str, Any]) -> None:
    """Raise an error for a method that does not allow the protection, before anything is trained."""
    wanted = Protection(**{name: value for name, value in settings.items() if name in names(Protection)})
    for entrant in taken:
        method = entrant.method
        if entrant.optional:
            continue  # left out when its turn comes
        if isinstance(method, str):
            base, changes = parts(method)
            own = {name: value for name, value in settings.items() if name in names(method_class(method))}
            method = make_method(method, **method_preset(protocol, base) | changes | own)
        wanted.check(method)
