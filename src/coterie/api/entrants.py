"""The methods of a comparison: as they were named, with the settings that vary, and the runs that they need."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coterie.analysis.lookup import method_class, method_name, parts, training
from coterie.analysis.outcomes import label, title
from coterie.api.data import DataSettings
from coterie.api.methods import make_method
from coterie.api.protocols import method_preset
from coterie.api.settings import names, reason
from coterie.api.variations import combinations, from_values, listed_values, searchable, word
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.methods import METHODS
from coterie.privacy import Protection

ALL = "all"  # stands for every method
FIXED = {
    "rounds": "curves over rounds show every number of rounds",
    "seed": "`seeds` runs every method with several seeds",
    "evaluate_every": "it does not change training",
    "new_clients": "it changes the clients that are measured",
}
Methods = Sequence[str | AnyMethod] | Mapping[str, str | AnyMethod]


class Entrant(NamedTuple):
    """A method of a comparison."""

    name: str  # of its folders
    method: str | AnyMethod
    called: str | None = None  # its name in tables; None: as the method reports
    optional: bool = False  # one of `all`: left out with the reason if it refuses the data or the network
    settings: tuple[tuple[str, Any], ...] = ()  # that vary between entrants

    @property
    def detail(self) -> str:
        """Such as ", lr 0.01", as reports name runs that differ in a setting."""
        return "".join(f", {name.replace('_', ' ')} {value}" for name, value in self.settings)

    @property
    def title(self) -> str:
        own = title(self.method) if isinstance(self.method, str) else self.method.title
        return f"{self.called or own}{self.detail}"

    @property
    def labels(self) -> dict[str, str]:
        """Name in tables -> name in result.json, of the numbers that it reports."""
        kind = method_class(parts(self.method)[0]) if isinstance(self.method, str) else self.method
        return {f"{label(self.method, name, self.called)}{self.detail}": name for name in kind.results}


def entrants(methods: Methods, over: Mapping[str, Any] | None = None) -> list[Entrant]:
    """The methods as they were given, each with every combination of the settings in `over`. Wrong names are errors.

    over: setting -> its values, or text such as "0.01,0.1". A setting that only some methods have varies for those.
    """
    listed = as_given(methods)
    if not over:
        return listed
    kinds = [method_class(e.method) if isinstance(e.method, str) else type(e.method) for e in listed]
    known = [searchable(kind) for kind in kinds]
    values: dict[str, list[Any]] = {}
    for given, asked in over.items():
        name = given.replace("-", "_")
        if name in FIXED:
            raise CoterieError(f"{name} cannot vary in a comparison: {FIXED[name]}")
        kind = next((own[name] for own in known if name in own), None)
        if kind is None and name in names(DataSettings):
            raise CoterieError(f"{name} cannot vary: all methods of a comparison share their data; run two comparisons")
        if kind is None:
            raise CoterieError(reason(name, set().union(*known) - FIXED.keys(), listed[0].title, kinds))
        values[name] = listed_values(name, kind, asked) if isinstance(asked, str) else from_values(name, kind, asked)
    return [
        varied(entrant, chosen)
        for entrant, own in zip(listed, known, strict=True)
        for chosen in combinations({name: tried for name, tried in values.items() if name in own})
    ]


def as_given(methods: Methods) -> list[Entrant]:
    if isinstance(methods, str) or not methods:
        raise CoterieError("methods must be a list of at least one method, such as ['fedavg', 'fedpac']")
    if isinstance(methods, Mapping):
        return [Entrant(called, canonical(method), called) for called, method in methods.items()]
    if ALL in methods:
        if len(methods) > 1:
            raise CoterieError("'all' names every method, so it cannot be combined with others")
        listed = [*(name for name in METHODS if name != "fedavg"), "fedavg"]
        return [Entrant(name, name, optional=True) for name in listed]
    found = [canonical(method) for method in methods]
    return [Entrant(method if isinstance(method, str) else method.title, method) for method in found]


def canonical(method: str | AnyMethod) -> str | AnyMethod:
    return method_name(method) if isinstance(method, str) else method


def varied(entrant: Entrant, chosen: Mapping[str, Any]) -> Entrant:
    """The entrant with these settings, which must not be set in the method already."""
    method = entrant.method
    if not isinstance(method, str):
        for name in sorted(chosen.keys() & (method.explicit | method.train.explicit)):
            raise CoterieError(f"{name} is set in {entrant.title} and varies in `over`; remove one of them")
    ending = "".join(f"-{name}={word(value)}" for name, value in chosen.items())
    name = f"{entrant.name}{re.sub(r'[^a-zA-Z0-9_.=+:-]', '_', ending)}"
    return entrant._replace(name=name, settings=tuple(chosen.items()))


def trainings(listed: Sequence[Entrant]) -> list[Entrant]:
    """The runs that these methods need: one training can report several of them."""
    found: dict[str, Entrant] = {}
    for entrant in listed:
        if isinstance(entrant.method, str) and entrant.called is None:
            base = training(entrant.method)
            entrant = entrant._replace(name=base + entrant.name.removeprefix(entrant.method), method=base)
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
        for shown in entrant.labels:
            if shown in owners:
                raise CoterieError(
                    f"{owners[shown]} and {entrant.name} both report their results as '{shown}'; give one of the "
                    "classes another `title` (and `results`)"
                )
            owners[shown] = entrant.name


def reference_of(listed: Sequence[Entrant], against: str | None) -> str | None:
    """The title of the method that the others are tested against; None: the best will be."""
    titles, taken = [entrant.title for entrant in listed], trainings(listed)
    if against is None or against in titles or any(against in entrant.labels for entrant in taken):
        return against
    if any(entrant.settings for entrant in listed):
        raise CoterieError(f"{against} is not among the entrants: choose one of {'; '.join(titles)}")
    name = method_name(against)
    if training(name) not in {entrant.name for entrant in taken}:
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
            given = {**settings, **dict(entrant.settings)}
            own = {name: value for name, value in given.items() if name in names(method_class(method))}
            method = make_method(method, **method_preset(protocol, base) | changes | own)
        wanted.check(method)


def check_fixed(listed: Sequence[Entrant], settings: Mapping[str, Any]) -> None:
    """Raise an error for a setting that is given both in `over` and for all methods."""
    for name in dict.fromkeys(name for entrant in listed for name, _ in entrant.settings):
        if settings.get(name) is not None:
            raise CoterieError(f"{name} is given twice: {settings[name]} for all methods, and in `over`; remove one")
