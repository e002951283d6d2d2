"""One YAML file for a run or a comparison, with the keys of `coterie.run` and `coterie.compare`."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from coterie.analysis.lookup import method_class, method_name
from coterie.api.data import VARY, DataSettings, load_clients
from coterie.api.settings import GROUPS, elsewhere, names
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, unknown
from coterie.core.synonyms import nearest
from coterie.core.validation import fitting, read_yaml
from coterie.execution.choice import Execution

BOTH: dict[str, Any] = {  # key -> type; `data` and `backend` may also be mappings of their settings
    "data": str | dict,
    "model": str,
    "model_args": dict,
    "head": str,
    "train_only": str,
    "protocol": str,
    "backend": str | dict,
    "out": str,
    "exist": str,
    "track": str | list,
}
RUN: dict[str, Any] = {"method": str, **BOTH}
COMPARE: dict[str, Any] = {"methods": list, "seeds": int, "against": str, "over": dict, **BOTH}
SECTIONS: dict[str, Any] = {"data": DataSettings, "backend": Execution}
SHORT = {"data": "dataset", "backend": "backend"}  # the setting that a section stands for if it is text
HOW = {"run": (RUN, "coterie.run"), "compare": (COMPARE, "coterie.compare")}


class Configuration(NamedTuple):
    """The content of a file, checked: every key is known, and every value has its type."""

    path: Path
    given: Mapping[str, Any]  # without data and backend
    data: Mapping[str, Any]  # fields of DataSettings, without protocol
    execution: Mapping[str, Any]  # fields of Execution


def load_config(path: str | Path) -> dict[str, Any]:
    """The arguments of `coterie.run`, or of `coterie.compare` if the file has `methods`, from a YAML file.

    The keys are those of the parameters in Python. `data` holds the arguments of `load_clients`, or is the name of a
    dataset; `backend` holds the settings of an Execution, or is the name of a backend. Relative paths are relative to
    the working directory.

    >>> coterie.run(**coterie.load_config("run.yaml"))  # doctest: +SKIP
    """
    content = read(Path(path))
    found = checked(Path(path), content, "compare" if "methods" in content else "run")
    arguments = dict(found.given)
    protocol = {"protocol": arguments["protocol"]} if "protocol" in arguments else {}
    settings, seed = {**found.data, **protocol}, arguments.get("seed") or 0

    def clients(seed: int) -> FederatedData:
        return load_clients(seed=seed, **settings)

    varies = "methods" in content and settings.get("partition_seed") == VARY
    data: FederatedData | Callable[[int], FederatedData] = clients if varies else clients(seed)
    backend = {"backend": Execution(**found.execution)} if found.execution else {}
    return {**arguments, "data": data, **backend}


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    content: Any = read_yaml(path, lambda content: content)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CoterieError(f"{path}: a configuration maps names of settings to values, such as `rounds: 100`")
    return content


def checked(path: Path, content: Mapping[str, Any], kind: str, method: str | None = None) -> Configuration:
    """Check the content of a file for `kind`, run or compare. The error lists all problems, one per line.

    method: of a run, if the file does not name it.
    """
    keys, _ = HOW[kind]
    try:
        own = settings_of(content, kind, method)
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from None
    problems: list[str] = []
    given: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in content.items():
        hint = keys.get(key, own.get(key))
        if hint is None:
            problems.append(misplaced(key, kind, {*keys, *own}, content, method))
        elif key in SECTIONS and isinstance(value, dict):
            sections[key] = section(key, value, problems)
        else:
            taken(key, value, hint, given, problems)
    for name, word in SHORT.items():
        if name in given:
            sections[name] = {word: given.pop(name)}
    if problems:
        wrong = CoterieError(f"{path}: {problems[0]}")
        for problem in problems[1:]:
            wrong.add_note(f"coterie: {path}: {problem}")
        raise wrong
    return Configuration(path, given, sections["data"], sections["backend"])


def settings_of(content: Mapping[str, Any], kind: str, method: str | None) -> dict[str, Any]:
    """Setting -> type: of the groups of coterie.run and, in a run, of the method."""
    found = {name: hint for group in GROUPS.values() for name, hint in hints(group).items()}
    method = method or (content.get("method") if kind == "run" else None)
    return found | (hints(method_class(method_name(method))) if isinstance(method, str) else {})


def hints(kind: type) -> dict[str, Any]:
    """Field -> type; Any if the annotations of a user's class cannot be resolved."""
    try:
        known = typing.get_type_hints(kind)
    except (NameError, TypeError, AttributeError):
        known = {}
    return {f.name: known.get(f.name, Any) for f in fields(kind) if f.name != "train"}


def section(key: str, content: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The settings of data or backend."""
    known, found = hints(SECTIONS[key]), dict[str, Any]()
    if key == "data":
        known.pop("protocol")
    for name, value in content.items():
        if name == "protocol" and key == "data":
            problems.append("data.protocol: give `protocol` outside of `data`; it holds for the whole run")
        elif name not in known:
            problems.append(str(unknown(f"key in {key}", str(name), known)))
        else:
            taken(name, value, known[name], found, problems, f"{key}.")
    return found


def taken(name: str, value: Any, hint: Any, into: dict[str, Any], problems: list[str], where: str = "") -> None:
    """Add a value of the right type; None stands for a setting that is not given."""
    if value is None:
        return
    try:
        into[name] = typed(f"{where}{name}", value, hint)
    except CoterieError as error:
        problems.append(str(error))


def typed(where: str, value: Any, hint: Any) -> Any:
    """The value as the first type of a union that accepts it; otherwise raise the error of the first type."""
    if hint is Any:
        return value
    options = [o for o in typing.get_args(hint) if o is not type(None)] if isinstance(hint, types.UnionType) else [hint]
    errors = []
    for option in options:
        try:
            return fitting(where, number(value) if option is float else value, option)
        except CoterieError as error:
            errors.append(error)
    raise errors[0]


def number(value: Any) -> Any:
    """YAML reads 1e-3 as text."""
    try:
        return float(value) if isinstance(value, str) and "e" in value.lower() else value
    except ValueError:
        return value


def misplaced(key: str, kind: str, known: set[str], content: Mapping[str, Any], method: str | None) -> str:
    """Why there is no such key here, and what to do."""
    for name, group in SECTIONS.items():
        if key in names(group):
            return f"'{key}' is a setting of {name}: write it below `{name}:`"
    other, where = HOW["compare" if kind == "run" else "run"]
    if key in other:
        return f"'{key}' is a key of {where}, not of {HOW[kind][1]}"
    named = method or content.get("method")
    title = method_class(method_name(named)).title if kind == "run" and isinstance(named, str) else "every method here"
    others = elsewhere(title)
    if key in others:
        return f"'{key}' is {others[key]}"
    near = nearest(key, sorted(known))
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown key '{key}': {hint}"
