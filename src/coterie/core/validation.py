"""Check plain data from files and messages, and settings that Python code passes, against declared types and ranges.

`fitting` and `MappingReader` turn plain data (YAML, JSON) into typed values; `check_fields` checks the values of a
dataclass. Errors name the key. A field declares its range in its metadata, next to its help text: `low` and `high` are
allowed values, `above` and `below` are not. A number with a range must also be finite, unless `high` is infinity.

    lr: float = field(default=0.01, metadata={"help": "learning rate", "low": 0})
    width: float = field(default=1.0, metadata={"help": "width of the kernel", "above": 0})
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from coterie.core.errors import CoterieError, unknown

WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
WORDS |= {dict: "a mapping", list: "a list", tuple: "a list"}
PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}
T = TypeVar("T")
MOST_LETTERS = 2**18  # of a YAML file
ALIKE = 0.7  # similarity from which an unknown key is taken for a misspelled missing one


def load_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, and aliases: aliases of aliases grow exponentially."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise CoterieError("aliases (*name) are not supported")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for name, count in counts.most_common(1):
                if count > 1:
                    raise CoterieError(f"'{name}' is there twice, line {node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    if len(text) > MOST_LETTERS:
        raise CoterieError(f"{len(text):,} characters; at most {MOST_LETTERS:,} are read")
    try:
        return yaml.load(text, Loader)  # noqa: S506 - it is a SafeLoader
    except RecursionError:
        raise CoterieError("not YAML that can be read: it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # a date or number that does not exist
        raise CoterieError(f"not YAML: {error}") from None
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f", line {line + 1}"
        raise CoterieError(f"not YAML{where}: {getattr(error, 'problem', None) or error}") from None


def read_yaml(path: Path, interpret: Callable[[Any], T]) -> T:
    """The content of a YAML file, as `interpret` returns it. All errors name the file."""
    try:
        with path.open("rb") as file:
            text = file.read(4 * MOST_LETTERS + 1).decode()
    except OSError as error:
        raise CoterieError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CoterieError(f"{path}: is not UTF-8 text") from None
    try:
        return interpret(load_yaml(text))
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from None


class Limits(NamedTuple):
    """Bounds for messages from outside. Numbers stay as they were sent: signatures cover their text."""

    items: int  # of a list
    letters: int  # of a text, which must be printable
    number: float  # magnitude


class MappingReader:
    """A mapping from which keys are taken one by one; `close` raises for keys that are left."""

    def __init__(self, where: str, content: Any) -> None:
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise CoterieError(f"{where or 'the file'}: must be a mapping of names to values, not {content!r:.60}")
        self.where, self.left = where, dict(content)
        self.known: list[str] = []

    def take(self, key: str, kind: Any, default: Any = ...) -> Any:
        self.known.append(key)
        if key in self.left:
            return fitting(f"{self.where}{key}", self.left.pop(key), kind)
        if default is ...:
            for meant in difflib.get_close_matches(key, self.left, n=1, cutoff=ALIKE):
                raise self.unknown(meant, [key])
            raise CoterieError(f"{self.where}{key} is missing")
        return default

    def name(self, key: str, known: Iterable[str], default: Any = ...) -> Any:
        """The value of a key, which must be one of the known ones."""
        value = self.take(key, str, default)
        if value not in known and value is not default:
            raise unknown(f"{self.where}{key}", value, known)
        return value

    def unknown(self, key: str, known: Iterable[str]) -> CoterieError:
        place = self.where.rstrip(".: ")
        return unknown(f"key in {place}" if place else "key", key, known)

    def close(self) -> None:
        for key in self.left:
            raise self.unknown(key, self.known)


def fitting(where: str, value: Any, kind: Any, limits: Limits | None = None) -> Any:
    """Plain data as a value of a type: scalars, unions, lists as tuples, mappings as dataclasses; or CoterieError."""
    if is_dataclass(kind):
        return from_mapping(where, value, kind, limits)
    if isinstance(kind, types.UnionType):
        if value is None and type(None) in typing.get_args(kind):
            return None
        if str in typing.get_args(kind) and isinstance(value, str):
            return fitting(where, value, str, limits)
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if limits and isinstance(value, list) and len(value) > limits.items:
        raise CoterieError(f"{where} has {len(value):,} items; at most {limits.items:,} are accepted")
    origin = typing.get_origin(kind) or kind
    if origin is tuple and isinstance(value, list):
        inner = typing.get_args(kind)
        if inner[-1] is Ellipsis:
            inner = inner[:1] * len(value)
        if len(inner) == len(value):
            pairs = enumerate(zip(value, inner, strict=True))
            return tuple(fitting(f"{where}[{i}]", part, k, limits) for i, (part, k) in pairs)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) < math.inf and (isinstance(value, float) or value.bit_length() < 1024):
            return within(where, value, limits) if limits else float(value)
    elif isinstance(origin, type) and isinstance(value, origin) and not (kind is int and isinstance(value, bool)):
        return within(where, value, limits) if limits else value
    hint = " (YAML reads 5e-4 as text: write 0.0005)" if kind is float and isinstance(value, str) else ""
    raise CoterieError(f"{where} is {value!r:.60}: it must be {WORDS.get(origin, kind)}{hint}")


def from_mapping(where: str, value: Any, kind: Any, limits: Limits | None) -> Any:
    """A dataclass from a mapping with exactly its fields."""
    hints, names = typing.get_type_hints(kind), {f.name for f in fields(kind)}
    if not isinstance(value, dict):
        raise CoterieError(f"{where} is {value!r:.60}: it must be a mapping")
    for what, found in (("is missing", names - value.keys()), ("is unknown", value.keys() - names)):
        if found:
            raise CoterieError(f"{where}.{min(map(str, found))!r:.60} {what}")
    return kind(**{name: fitting(f"{where}.{name}", part, hints[name], limits) for name, part in value.items()})


def within(where: str, value: Any, limits: Limits) -> Any:
    """A scalar, if it is within the limits."""
    if isinstance(value, str) and (len(value) > limits.letters or not value.isprintable()):
        raise CoterieError(f"{where} is longer than {limits.letters:,} characters, or not printable")
    if isinstance(value, int | float) and not -limits.number <= value <= limits.number:
        raise CoterieError(f"{where} is too large")
    return value


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse the first value that is not of its field's type, or else the first outside of its field's range."""
    check_types(kind, values)
    for f in fields(kind):
        value = values.get(f.name)
        limits = {name: f.metadata[name] for name in LIMITS if name in f.metadata}
        if not limits or not isinstance(value, Real):
            continue
        finite = isinstance(value, Integral) or math.isfinite(value) or value == limits.get("high")
        if not finite or not all(LIMITS[name][1](value, limit) for name, limit in limits.items()):
            words = " and ".join(f"{LIMITS[name][0]} {limit}" for name, limit in limits.items()) if finite else "finite"
            raise CoterieError(f"{f.name} must be {words}, got {value}")


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Refuse the first value that is not of its field's type. Only numbers, booleans and text are checked."""
    for name, value in values.items():
        allowed = plain_types(kind).get(name, ())
        if allowed and not any(fits(value, one) for one in allowed):
            words = " or ".join(PLAIN[one] for one in allowed)
            raise CoterieError(f"{name} must be {words}, got {value!r:.60} ({type(value).__name__})")


@cache
def plain_types(kind: type) -> dict[str, tuple[type, ...]]:
    """Field -> the types it may have, where all of them are plain."""
    try:
        hints = typing.get_type_hints(kind)
    except (NameError, TypeError, AttributeError):  # annotations of a user's class that cannot be resolved
        return {}
    found = {name: typing.get_args(h) if isinstance(h, types.UnionType) else (h,) for name, h in hints.items()}
    return {name: given for name, given in found.items() if all(one in PLAIN for one in given)}


def fits(value: object, kind: type) -> bool:
    if isinstance(value, bool | np.bool_):
        return kind is bool
    if kind is int:
        return isinstance(value, Integral)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    return isinstance(value, Real if kind is float else kind)


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


class Explicit:
    """Base of frozen dataclasses that check the fields passed to their constructor, and remember which they were.

    A protocol fills in the other fields, and only those.
    The record is no field: comparison, `repr`, `asdict` and the methods' code do not see it. `dataclasses.replace`
    passes every field, so all fields of its result count as set; `but` keeps the record.
    """

    _explicit: frozenset[str]

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Explicit.__repr__  # type: ignore[method-assign]  # before `dataclass` adds its own

    def __repr__(self) -> str:
        """Such as FedPAC(align=0.5): the fields that differ from their defaults."""
        values = ((f, getattr(self, f.name)) for f in fields(self) if f.repr)  # type: ignore[arg-type]
        shown = [f"{f.name}={value!r}" for f, value in values if value != default_of(f)]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        made = super().__new__(cls)
        known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
        passed = dict(zip(known, args, strict=False)) | {name: settings[name] for name in known if name in settings}
        check_fields(cls, passed)
        object.__setattr__(made, "_explicit", frozenset(passed))
        return made

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the fields that were set."""
        return self._explicit

    def but(self, **changes: Any) -> Self:
        """A copy with these fields set to other values."""
        made = replace(self, **changes)  # type: ignore[type-var]
        object.__setattr__(made, "_explicit", self._explicit | changes.keys())
        return made
