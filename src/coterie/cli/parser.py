"""A parser whose errors are one line, with the command or flag that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from coterie.core.synonyms import translated

FEW_FLAGS = 8  # that a usage line lists
MOST_SUGGESTED = 3
CHOICES = re.compile(r"(invalid choice: '(.*)') \(choose from (.*)\)$", re.S)


class ShortUsage(argparse.HelpFormatter):
    """Usage lines on which [options] stands for the flags of commands that have many."""

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: Any = None) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if len(list(actions)) > len(needed) + FEW_FLAGS:
            actions = [argparse.Action([], "options", metavar="[options]"), *needed]
        super().add_usage(usage, actions, groups, prefix)


class Listed(argparse.Action):
    """A flag whose words are separated by commas or spaces; its value has commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        lists = {name for action in self._actions if isinstance(action, Listed) for name in action.option_strings}
        chosen, rest = super().parse_known_args(with_commas(args, lists) if lists and args else args, namespace)
        if rest:
            unknown = next((word for word in rest if word.startswith("-")), "")
            near = self.flags_near(unknown.partition("=")[0])
            hint = f": did you mean {' or '.join(near)}?" if near else self.switch_before(rest[0], args)
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return chosen, rest

    def switch_before(self, word: str, args: Sequence[str] | None) -> str:
        """Say that the flag before a word takes no value, if that is so."""
        words = list(args or ())
        before = words[words.index(word) - 1] if word in words[1:] else ""
        switches = [name for a in self._actions if a.nargs == 0 for name in a.option_strings]
        return f": {before} takes no value" if before in switches else ""

    def flags_near(self, unknown: str) -> list[str]:
        """What other libraries call so; else flags with these words in their name; else the one with a similar name;
        else flags about these words.
        """
        asked = unknown.strip("-")
        about = {
            name: str(action.help) for action in self._actions for name in action.option_strings if name[:2] == "--"
        }
        ours = translated(asked, [name.removeprefix("--").replace("-", "_") for name in about])
        known = [f"--{name.replace('_', '-')}" for name in ours]
        if known or not unknown.startswith("--") or not asked:
            return known
        return (
            [name for name in about if len(asked) > 3 and asked in name][:MOST_SUGGESTED]
            or difflib.get_close_matches(unknown, about, n=1, cutoff=0.75)
            or [name for name, text in about.items() if asked.replace("-", " ") in text][:MOST_SUGGESTED]
        )

    def error(self, message: str) -> NoReturn:
        found = CHOICES.search(message)
        near = nearest(found[2], re.findall(r"[\w-]+", found[3])) if found else []
        if found and near:
            message = f"{message[: found.start()]}{found[1]}: did you mean '{near[0]}'?"
        elif found and "COMMAND" in message:  # all are too many for a line
            message = message[: found.start()] + found[1]
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` explains)\n")


def with_commas(words: Sequence[str], flags: set[str]) -> list[str]:
    """Join what follows these flags with commas, up to the next flag or the name of a file or folder."""
    found: list[str] = []
    values: int | None = None  # of the current flag, so far, counted up to 1; None: no such flag
    for word in words:
        if values and not word.startswith("-") and not os.path.lexists(word):
            found[-1] = f"{found[-1].rstrip(',')},{word}"
            continue
        name, assigned, _ = word.partition("=")
        values = len(assigned) if name in flags else 1 if values == 0 else None
        found.append(word)
    return found


def nearest(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
