"""All settings by name: where each belongs, and what a wrong name probably means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from coterie.api.data import DataSettings
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.synonyms import nearest
from coterie.core.training import LocalTraining
from coterie.core.validation import Explicit
from coterie.execution.choice import Execution
from coterie.federation import Ending, Safety, Settings
from coterie.methods import METHODS
from coterie.privacy import Protection
from coterie.privacy.encryption import Encryption

GROUPS: dict[str, Any] = {  # settings of coterie.run that can be given whole, by parameter
    "settings": Settings,
    "train": LocalTraining,
    "ending": Ending,
    "safety": Safety,
    "protection": Protection,
    "encryption": Encryption,
}
INTERNAL = {  # parameters of `execute` that a user cannot give -> what to do instead
    "resume": "exist='resume' continues the run in `out`",
    "watching": "did you mean 'watch'?",
    "interrupted": "Ctrl-C ends a run, or a `watch` that raises an error",
}
CALL = dict.fromkeys(("method", "model", "out", "watch", "track", "progress"), "a parameter of coterie.run")
CALL["seeds"] = "a parameter of coterie.compare"
GREEK = {"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "kappa": "κ", "mu": "μ", "rho": "ρ",
         "sigma": "σ", "tau": "τ", "lambda": "λ", "lambda_": "λ", "lamda": "λ", "lam": "λ"}  # fmt: skip
RUN = (Settings, Safety, Ending, Protection, Encryption)  # settings of coterie.run besides those of the method


def names(*kinds: Any) -> set[str]:
    return {f.name for kind in kinds for f in fields(kind)} - {"train"}


SETTINGS = names(*GROUPS.values())  # parameters of coterie.run


def merged(groups: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, from groups given whole and settings given by name. A setting that has both is an error."""
    found = dict(named)
    for name, group in groups.items():
        kind = GROUPS[name]
        if not isinstance(group, kind):
            raise CoterieError(f"{name} must be a coterie.{kind.__name__}, got {type(group).__name__}")
        for twice in sorted(names(kind) & named.keys()):
            raise CoterieError(
                f"{twice} is given by name, next to {name}=: put it into {name}=coterie.{kind.__name__}({twice}=...)"
            )
        chosen = group.explicit if isinstance(group, Explicit) else names(kind)
        found |= {field: getattr(group, field) for field in chosen}
    return found


def check_internal(given: Iterable[str]) -> None:
    """Raise an error for names of parameters that only `execute` has."""
    for name in given:
        if name in INTERNAL:
            raise CoterieError(f"unknown setting '{name}': {INTERNAL[name]}")


def check_settings(given: Iterable[str], method: type[AnyMethod], training_only: bool = False) -> None:
    """Raise an error for the first setting that neither this method nor a run with it has.

    training_only: only settings of the method and of local training count, as where a method is made.
    """
    fitting = names(method, LocalTraining) | (set() if training_only else names(*RUN))
    for name in given:
        if name not in fitting:
            raise CoterieError(reason(name, fitting, method.title, [method]))


def reason(name: str, fitting: set[str], title: str, methods: Sequence[type[AnyMethod]] = ()) -> str:
    """Why there is no such setting, and what to do.

    fitting: names that there are. methods: whose settings may have this name in their papers, as a Greek letter.
    """
    where = elsewhere(title)
    if symbols := [field for method in methods for field in by_letter(name, method)]:
        other = f" Or it is {where[name]}" if name in where else ""
        return f"unknown setting '{name}': did you mean {either(symbols)} ({GREEK[name.lower()]})?{other}"
    if name in where:
        return f"'{name}' is {where[name]}"
    others = CALL | where
    near = nearest(name, sorted(fitting), sorted(others))
    if not near:
        own = ", ".join(sorted(fitting - names(LocalTraining, *RUN))) or "no settings of its own"
        return f"unknown setting '{name}': {title} has {own}; help(coterie.run) lists those of all methods"
    if near[0] in fitting:
        return f"unknown setting '{name}': did you mean {either(near)}?"
    return f"unknown setting '{name}': did you mean {either(near)}? It is {others[near[0]]}"


def either(named: Sequence[str]) -> str:
    return " or ".join(f"'{one}'" for one in dict.fromkeys(named))


def by_letter(name: str, method: type[AnyMethod]) -> list[str]:
    """The settings of a method that its paper calls by this Greek letter, as (λ) or (λ_1) in their help."""
    letter = GREEK.get(name.lower())
    if letter is None:
        return []
    return [f.name for f in fields(method) if re.search(rf"\({letter}[_0-9)]", f.metadata.get("help", ""))]


def elsewhere(title: str) -> dict[str, str]:
    """Setting -> what it is and where to give it, for settings that are not of this method."""
    found: dict[str, str] = {}
    owners: dict[str, list[str]] = {}
    for kind in METHODS.values():
        for name in names(kind):
            owners.setdefault(name, []).append(kind.title)
    for name, titles in owners.items():
        found[name] = f"a setting of {', '.join(titles)}, not of {title}"
    found |= dict.fromkeys(names(*RUN), "a setting of coterie.run, not of a method")
    found |= dict.fromkeys(names(Execution), "a setting of Execution: give it as backend=coterie.Execution(...)")
    found |= dict.fromkeys(names(DataSettings), "a data setting: give it to coterie.load_clients")
    return found
