"""YAML into mappings whose keys and types are checked. What is wrong is told with the key."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any

from coterie.core.errors import CoterieError, unknown

WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
WORDS |= {dict: "a mapping", list: "a list"}
ALIKE = 0.7  # how near a key must be to one that is missing to be taken for it


def load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise CoterieError("recipes need PyYAML: pip install pyyaml") from None

    class Loader(yaml.SafeLoader):
        """A key that is there twice is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise CoterieError(f"'{name}' is there twice, line {node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f", line {line + 1}"
        raise CoterieError(f"not YAML{where}: {getattr(error, 'problem', None) or error}") from None


class Keys:
    """A mapping of the file, from which keys are taken; what is left at the end nobody knows."""

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
                raise unknown(f"key {self.where}".strip(), meant, [key])
            raise CoterieError(f"{self.where}{key} is missing")
        return default

    def name(self, key: str, known: Iterable[str], default: Any = ...) -> Any:
        """The value of a key, which must be one of the known ones."""
        value = self.take(key, str, default)
        if value not in known and value is not default:
            raise unknown(f"{self.where}{key}", value, known)
        return value

    def close(self) -> None:
        for key in self.left:
            raise unknown(f"key {self.where}".strip(), key, self.known)


def fitting(where: str, value: Any, kind: Any) -> Any:
    """The value as this type has it, or an error."""
    if isinstance(kind, types.UnionType):
        if value is None and type(None) in typing.get_args(kind):
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        inner = typing.get_args(kind)
        if inner[-1] is Ellipsis:
            inner = inner[:1] * len(value)
        if len(inner) == len(value):
            return tuple(fitting(where, part, k) for part, k in zip(value, inner, strict=True))
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    hint = " (YAML takes 5e-4 for a text: write 0.0005)" if kind is float and isinstance(value, str) else ""
    raise CoterieError(f"{where} is {value!r:.60}: it must be {WORDS.get(kind, kind)}{hint}")
